"""The commands ``plan`` and ``doctor``: parse, call, print."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .cli_options import (
    AsJson,
    Cache,
    Dtype,
    ExpertsOn,
    LatentDtype,
    Latents,
    Ram,
    Summaries,
    Sweep,
    Threads,
    Trunk,
    TrunkOn,
    Vram,
    at_least_one,
)
from .config import parse_size
from .errors import UsageError
from .find import find_model
from .machine import default_threads, read_machine
from .progress import Progress, loading_libraries, write_out

if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .doctor_system import Fact
    from .forecast_device import Bus
    from .plan_report import Ask, Model
    from .rates import Rates
    from .spec import ModelSpec

_COUNTS = ("context", "sessions", "sweep", "threads")
_OF_A_GPU = ("vram_gbps", "pcie_gbps", "gpu_gmacs")
_RATES = ("disk_gbps", "ram_gbps", "gmacs", *_OF_A_GPU)
USUAL_CONTEXT = 4096
_ORIGINS = {"COMMANDLINE": "flag", "ENVIRONMENT": "variable", "DEFAULT": "default"}


DiskRate = Annotated[float | None, typer.Option(help="Reads from disk, GB/s.")]
RamRate = Annotated[float | None, typer.Option(help="Reads from memory, GB/s.")]
Macs = Annotated[
    float | None, typer.Option(help="Large bfloat16 products, 1e9 multiply-adds a second.")
]
HitRate = Annotated[
    float | None, typer.Option(help="Of decode requests by experts in RAM, 0 to 1.")
]
VramRate = Annotated[float | None, typer.Option(help="Memory of the GPU, GB/s.")]
BusRate = Annotated[float | None, typer.Option(help="Copies to the GPU, GB/s.")]
DeviceMacs = Annotated[
    float | None, typer.Option(help="Large bfloat16 products of the GPU, as --gmacs.")
]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command("plan")(plan)
    app.command("doctor")(doctor)


def plan(
    model: Annotated[
        str | None, typer.Argument(help="Folder, hub id in the local cache, or 'nano'.")
    ] = None,
    config_only: Annotated[
        Path | None,
        typer.Option(help="A config.json (or its folder) instead; 'released' is the full model."),
    ] = None,
    ram: Ram = None,
    cache: Cache = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of a session; 4,096 if unset.")
    ] = None,
    sessions: Annotated[int, typer.Option(help="Sessions at a time.")] = 1,
    sweep: Sweep = None,
    dtype: Dtype = "bfloat16",
    trunk: Trunk = None,
    latent_dtype: LatentDtype = None,
    threads: Threads = None,
    disk_gbps: DiskRate = None,
    ram_gbps: RamRate = None,
    gmacs: Macs = None,
    hit_rate: HitRate = None,
    vram: Vram = None,
    experts_on: ExpertsOn = None,
    trunk_on: TrunkOn = None,
    latents: Latents = None,
    summaries: Summaries = None,
    vram_gbps: VramRate = None,
    pcie_gbps: BusRate = None,
    gpu_gmacs: DeviceMacs = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure this machine first.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a model needs and how fast it will be, before anything is loaded."""
    from .plan_report import render, report

    name, source, layout = layout_of(model, config_only)
    ask = ask_of(
        layout, ram=ram, cache=cache, context=context, sessions=sessions, sweep=sweep, dtype=dtype,
        trunk=trunk, threads=threads, hit_rate=hit_rate, vram=vram, experts_on=experts_on,
        trunk_on=trunk_on, latents=latents, summaries=summaries, latent_dtype=latent_dtype,
    )  # fmt: skip
    given = {"disk_gbps": disk_gbps, "ram_gbps": ram_gbps, "gmacs": gmacs}
    gpu = {"vram_gbps": vram_gbps, "pcie_gbps": pcie_gbps, "gpu_gmacs": gpu_gmacs}
    check_rates({**given, **gpu}, ask)
    rates = rates_of(layout, ask, measure, disk_gbps, ram_gbps, gmacs)
    made = report(name, layout, source, ask, rates, bus_of(*gpu.values()))
    write_out(json.dumps(made.to_dict()) if as_json else render(made))


def check_rates(given: Mapping[str, float | None], ask: Ask) -> None:
    """Refuse a rate that no machine has, and rates of a GPU where there is none."""
    for name, value in given.items():
        option = "--" + name.replace("_", "-")
        if name not in _RATES or value is None:
            continue
        if not 0 < value < 1e9:
            raise UsageError(f"{option} is {value}.", "It must be more than 0.")
        if ask.vram is None and name in _OF_A_GPU:
            raise UsageError(f"{option} is about a GPU.", "Say how much memory it has: --vram.")


def bus_of(memory: float | None, pcie: float | None, macs: float | None) -> Bus:
    """The GPU as it was described, the rest assumed."""
    from .forecast_device import ASSUMED, Bus

    given = (memory, pcie, macs)
    return Bus(*(have if g is None else g * 1e9 for g, have in zip(given, ASSUMED, strict=True)))


def layout_of(model: str | None, config_only: Path | None) -> tuple[str, str, Model]:
    from .checkpoint import Checkpoint
    from .paths import show_path
    from .plan_report import SpecLayout, spec_of

    if (model is None) == (config_only is None):
        raise UsageError(
            "plan wants a model or --config-only." if model is None
            else "plan wants a model or --config-only, not both.",
            "Give a model folder, or --config-only with a config.json.",
        )  # fmt: skip
    if config_only is not None:
        return show_path(config_only), "its config.json alone", SpecLayout(spec_of(config_only))
    assert model is not None
    folder = find_model(model)
    return show_path(folder), "its headers", Checkpoint.open(folder)


def ask_of(layout: Model, **given: Any) -> Ask:
    """The options, checked; raises ``UsageError``."""
    from .options import DTYPES, check_latent_dtype
    from .plan_report import Ask
    from .precision import choose_precision, stored_precision

    spec = layout.spec
    if given["context"] is None:
        given["context"] = min(USUAL_CONTEXT, spec.context)
    at_least_one(*((f"--{name}", given[name]) for name in _COUNTS))
    if given["context"] > spec.context:
        raise UsageError(
            f"--context {given['context']:,} is more than the model's {spec.context:,}.",
            "Give fewer tokens.",
        )
    if given["dtype"] not in DTYPES:
        raise UsageError(f"--dtype {given['dtype']!r} is not known.", f"Use {' or '.join(DTYPES)}.")
    check_latent_dtype(given.get("latent_dtype"))
    rate = given["hit_rate"]
    if rate is not None and not 0 <= rate <= 1:
        raise UsageError(f"--hit-rate is {rate}.", "It must be from 0 to 1.")
    stored = stored_precision(t.name for la in spec.layers for t in layout.trunk(la.index))
    trunk = choose_precision(given.pop("trunk"), stored)
    ram, cache, threads = (given.pop(name) for name in ("ram", "cache", "threads"))
    names = ("vram", "latents", "summaries")
    sizes = {name: given.pop(name, None) for name in names}
    sizes = {name: None if size is None else parse_size(size) for name, size in sizes.items()}
    if sizes["vram"] is not None and sizes["summaries"] is not None:
        raise UsageError(
            "--summaries is about what lies in RAM, and with a GPU its memory holds that.",
            "Leave out --summaries or --vram.",
        )
    return Ask(
        ram=int(read_machine().ceiling * 0.9) if ram is None else parse_size(ram),
        cache=None if cache is None else parse_size(cache),
        **sizes,
        threads=default_threads() if threads is None else threads,
        trunk=trunk,
        packed=stored != "bfloat16",
        **given,
    )


def rates_of(
    layout: Model,
    ask: Ask,
    measured: bool,
    disk: float | None,
    ram: float | None,
    gmacs: float | None,
) -> Rates:
    """Measured rates where asked for; what is given by hand always wins."""
    from .checkpoint import Checkpoint
    from .rates import assumed, scaled

    given = [None if value is None else value * 1e9 for value in (disk, ram, gmacs)]
    if not measured:
        return assumed(given[0], given[1], given[2], ask.dtype)
    with Progress() as progress:
        with loading_libraries(progress):
            from .bench_read import read_rate
            from .measure import measure
        speed = None
        if isinstance(layout, Checkpoint) and disk is None:
            progress.show("measuring reads of the model")
            speed = read_rate(layout).rate
        progress.show("measuring memory and kernels")
        found = measure(layout.spec, ask.threads, ask.dtype, speed).rates
    now = (found.disk, found.ram, found.macs["bfloat16"])
    factors = [1.0 if g is None else g / have for g, have in zip(given, now, strict=True)]
    return scaled(found, disk=factors[0], ram=factors[1], macs=factors[2])


def doctor(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="Also measure its reads and see whether it fits.")
    ] = None,
    ram: Ram = None,
    cache: Cache = None,
    dtype: Dtype = "bfloat16",
    trunk: Trunk = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine; every fact has a verdict, and a remedy where it is not good."""
    from . import doctor as found
    from .checkpoint import Checkpoint
    from .plan_report import RELEASED, SpecLayout, spec_of

    checkpoint = None if model is None else Checkpoint.open(find_model(model))
    layout = SpecLayout(spec_of(Path(RELEASED))) if checkpoint is None else checkpoint
    given = {"ram": ram, "cache": cache, "dtype": dtype, "trunk": trunk, "threads": threads}
    rest = {"context": None, "sessions": 1, "sweep": None, "hit_rate": None}
    ask = ask_of(layout, **given, **rest)
    origins = _origins(context, given, ask)
    for name in ("ram", "cache", "trunk"):
        if checkpoint is None and origins[name][1] == "flag":
            raise UsageError(f"--{name} is about a model.", "Name one, or leave it out.")
    with Progress() as progress:
        with loading_libraries(progress):
            from .open_device import why_no_gpu
        facts = found.system_facts(origins, why_no_gpu=why_no_gpu(0))
        facts += _measured_facts(layout.spec, ask, progress)
        if checkpoint is not None:
            progress.show("measuring reads of the model")
            facts += _model_facts(checkpoint, ask)
    write_out(json.dumps(found.to_dict(facts)) if as_json else found.render(facts))
    if not found.fine(facts):
        raise typer.Exit(1)


def _origins(context: typer.Context, given: dict[str, Any], ask: Ask) -> dict[str, tuple[Any, str]]:
    """Each setting in force and where it comes from."""
    origins = {}
    for name in given:
        source = context.get_parameter_source(name)
        kind = _ORIGINS[source.name] if source else "default"
        value = getattr(ask, name)
        origins[name] = ("none" if value is None else value, kind)
    for variable in ("K3_MODEL_FOLDERS", "HF_HUB_CACHE", "HF_HOME"):
        if variable in os.environ:
            origins[variable] = (os.environ[variable], "variable")
    return origins


def _measured_facts(spec: ModelSpec, ask: Ask, progress: Progress) -> list[Fact]:
    from .doctor import kernel_fact, speed_facts

    with loading_libraries(progress):
        from .kernels import native
        from .measure import measure
    progress.show("measuring memory and kernels")
    m = measure(spec, ask.threads, ask.dtype)
    return [
        kernel_fact(native.isas(), m.isa, m.why, m.chosen),
        *speed_facts(m.memory.threads, m.memory.copy, m.products, m.rates, m.isa is not None),
    ]


def _model_facts(checkpoint: Checkpoint, ask: Ask) -> list[Fact]:
    from .bench_read import read_rate
    from .doctor import model_facts
    from .plan_report import plan_of

    reads = read_rate(checkpoint)
    return model_facts(lambda: plan_of(checkpoint, ask), reads.rate, reads.mode, reads.notes)

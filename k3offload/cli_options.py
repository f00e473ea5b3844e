"""Options that several commands share, and what they mean."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from .errors import UsageError

Model = Annotated[str, typer.Argument(help="Folder, hub id in the local cache, or 'nano'.")]
Ram = Annotated[
    str | None,
    typer.Option(envvar="K3_RAM", help="Memory of the whole process, like 16G or 16GiB."),
]
Cache = Annotated[
    str | None, typer.Option(envvar="K3_CACHE", help="Most of it that may hold routed experts.")
]
Dtype = Annotated[
    str, typer.Option(envvar="K3_DTYPE", help="Of the activations: bfloat16 or float32.")
]
Trunk = Annotated[
    str | None,
    typer.Option(envvar="K3_TRUNK", help="Of the trunk: bfloat16 as shipped; int8, mxfp4: lossy."),
]
Threads = Annotated[
    int | None, typer.Option(envvar="K3_THREADS", help="Compute threads; all processors if unset.")
]
Kernel = Annotated[
    list[str] | None,
    typer.Option(metavar="OP=BACKEND", help="Implementation of an operator; repeatable."),
]
Isa = Annotated[
    str | None,
    typer.Option(envvar="K3_ISA", help="Instruction set of the native kernels; the best if unset."),
]
Policy = Annotated[
    str | None, typer.Option(envvar="K3_POLICY", help="Which expert leaves a full cache.")
]
Predict = Annotated[
    str | None, typer.Option(envvar="K3_PREDICT", help="Which experts are read ahead.")
]
Device = Annotated[str, typer.Option(envvar="K3_DEVICE", help="auto, cuda, cuda:N or cpu.")]
Vram = Annotated[
    str | None, typer.Option(envvar="K3_VRAM", help="Memory of the GPU to use, like 16G.")
]
ExpertsOn = Annotated[
    str | None, typer.Option(envvar="K3_EXPERTS_ON", help="gpu or cpu; gpu where there is one.")
]
TrunkOn = Annotated[
    str | None,
    typer.Option(envvar="K3_TRUNK_ON", help="gpu, cpu, or split:N: the first N layers on the GPU."),
]
AdaptiveBackend = Annotated[
    bool,
    typer.Option(
        "--adaptive-backend",
        help="CPU or GPU for each expert, whichever ends sooner; bits then vary from run to run.",
    ),
]
Sweep = Annotated[
    int | None,
    typer.Option(help="Most prompt tokens in one pass; as many as let it read least if unset."),
]
Latents = Annotated[
    str | None,
    typer.Option(
        envvar="K3_LATENTS",
        help="Most of it that may hold latents; the rest goes to --scratch. All of them where they "
        "fit, if unset.",
    ),
]
Summaries = Annotated[
    str | None,
    typer.Option(
        envvar="K3_SUMMARIES",
        help="Most of it that may hold a sweep's block summaries; the rest goes to --scratch.",
    ),
]
Scratch = Annotated[
    Path | None,
    typer.Option(envvar="K3_SCRATCH", help="Folder on a disk for what has no room in memory."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


class How(NamedTuple):
    """The options of loading a model, as they were typed."""

    ram: str | None
    cache: str | None
    dtype: str
    trunk: str | None
    sweep: int | None
    threads: int | None
    kernel: list[str] | None
    isa: str | None
    policy: str | None
    predict: str | None
    device: str
    vram: str | None
    experts_on: str | None
    trunk_on: str | None
    adaptive: bool
    latents: str | None
    summaries: str | None
    scratch: Path | None


def kernels_of(given: list[str] | None) -> dict[str, str]:
    """``["linear=reference"]`` -> ``{"linear": "reference"}``."""
    wanted = {}
    for text in given or ():
        op, equals, backend = text.partition("=")
        if not (op and equals and backend):
            raise UsageError(f"--kernel {text!r} names no implementation.", "Write OP=BACKEND.")
        wanted[op] = backend
    return wanted


def at_least_one(*given: tuple[str, int | None]) -> None:
    """Raise ``UsageError`` for a number below 1."""
    for name, value in given:
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}.", "It must be at least 1.")

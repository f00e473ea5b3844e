"""Options that several commands share, and what they mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import typer

from .config import parse_size
from .constrain import Grammar
from .errors import UsageError
from .sampling import Sampling

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
LatentDtype = Annotated[
    str | None,
    typer.Option(
        envvar="K3_LATENT_DTYPE",
        help="Of latents: as activations if unset; int8, fp8: about half the bytes, lossy.",
    ),
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
    str | None,
    typer.Option(
        envvar="K3_POLICY", help="Which expert leaves a full cache: a name, or a policy_NAME.py."
    ),
]
Predict = Annotated[
    str | None,
    typer.Option(
        envvar="K3_PREDICT", help="Which experts are read ahead: a name, or a predict_NAME.py."
    ),
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
Prompt = Annotated[
    str | None, typer.Argument(help="Text, or - to read it from stdin.", show_default=False)
]
PromptFile = Annotated[Path | None, typer.Option(help="The prompt as a UTF-8 file; - is stdin.")]
SessionFolder = Annotated[
    Path | None, typer.Option(help="Folder of a session to go on with, and to save to.")
]
PrefixDir = Annotated[
    str | None,
    typer.Option(envvar="K3_PREFIX_DIR", help="Folder that keeps the beginnings of prompts."),
]
PrefixDisk = Annotated[
    str | None, typer.Option(envvar="K3_PREFIX_DISK", help="Most bytes there; 16G if unset.")
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
TraceFolder = Annotated[
    Path | None,
    typer.Option("--trace", help="New folder that routing is recorded to, for bench policies."),
]
TraceParts = Annotated[
    list[str] | None,
    typer.Option(
        "--trace-with",
        help="Record also ahead, latent, margin, mixing or tiers; repeatable, and larger.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


class How(NamedTuple):
    """The options of loading a model, as they are typed."""

    ram: Ram = None
    cache: Cache = None
    dtype: Dtype = "bfloat16"
    trunk: Trunk = None
    latent_dtype: LatentDtype = None
    sweep: Sweep = None
    threads: Threads = None
    kernel: Kernel = None
    isa: Isa = None
    policy: Policy = None
    predict: Predict = None
    device: Device = "auto"
    vram: Vram = None
    experts_on: ExpertsOn = None
    trunk_on: TrunkOn = None
    adaptive_backend: AdaptiveBackend = False
    latents: Latents = None
    summaries: Summaries = None
    scratch: Scratch = None
    prefix_dir: PrefixDir = None
    prefix_disk: PrefixDisk = None
    trace: TraceFolder = None
    trace_with: TraceParts = None


class Choice(NamedTuple):
    """How tokens are chosen, as it is typed."""

    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None
    stop: Annotated[list[str] | None, typer.Option(help="End before this text.")] = None
    ignore_end: Annotated[bool, typer.Option(help="Go on after end tokens.")] = False

    def sampling(self, grammar: Grammar | None = None) -> Sampling:
        """Raises ``UsageError`` naming what is out of range."""
        return Sampling(**{**self._asdict(), "stop": tuple(self.stop or ())}, grammar=grammar)


def takes_how(*but: str, **more: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes of a command that takes ``how: How`` one that has its options instead, without those
    that are named in ``but`` and would do nothing there; ``more``: the same of other arguments,
    with the classes that list their options."""
    return takes(but, **more, how=How)


def takes(
    but: tuple[str, ...] = (), **groups: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The same of a command whose arguments of these names are such classes."""
    fields = {name: [f for f in group._fields if f not in but] for name, group in groups.items()}
    options = [
        Parameter(
            field,
            Parameter.KEYWORD_ONLY,
            default=group._field_defaults[field],
            annotation=get_type_hints(group, include_extras=True)[field],
        )
        for name, group in groups.items()
        for field in fields[name]
    ]

    def over(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def made(**given: Any) -> None:
            for name, group in groups.items():
                given[name] = group(**{field: given.pop(field) for field in fields[name]})
            command(**given)

        own = get_type_hints(command, include_extras=True)
        parameters = [
            parameter.replace(annotation=own[name], kind=Parameter.KEYWORD_ONLY)
            for name, parameter in signature(command).parameters.items()
            if name not in groups
        ]
        parameters += options
        show_parameters(made, parameters)
        return made

    return over


def show_parameters(command: Callable[..., None], parameters: list[Parameter]) -> None:
    """Let typer see ``parameters`` where ``command`` takes whatever it is given."""
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}


def loading_options(how: How) -> dict[str, Any]:
    """What ``open_engine`` takes of ``how``.  Raises ``UsageError``."""
    given = how._asdict()
    del given["trace"], given["trace_with"]
    given["adaptive"] = given.pop("adaptive_backend")
    given["kernels"] = wanted_kernels(given.pop("kernel"))
    for name in ("ram", "cache", "vram", "latents", "summaries", "prefix_disk"):
        given[name] = None if given[name] is None else parse_size(given[name])
    return given


def wanted_kernels(given: list[str] | None) -> dict[str, str]:
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


def not_below_0(*given: tuple[str, int | None]) -> None:
    """Raise ``UsageError`` for a number below 0."""
    for name, value in given:
        if value is not None and value < 0:
            raise UsageError(f"{name} is {value}.", "Give 0 or more.")


def above_0(*given: tuple[str, float | None]) -> None:
    """Raise ``UsageError`` for a number that is not more than 0, or none."""
    for name, value in given:
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{name} is {value}.", "It must be a number above 0.")

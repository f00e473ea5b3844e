"""What commands that run a model share: opening it with everything said, texts that are read from
files, a seed that is told."""

from __future__ import annotations

import dataclasses
import secrets
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from . import __version__
from .cli_options import How, loading_options
from .config import show_size
from .errors import UsageError
from .find import find_model
from .paths import show_path
from .progress import Progress
from .sampling import Sampling
from .session_manifest import refuse_in_model

if TYPE_CHECKING:
    from .engine import Engine
    from .scheduler.plan import Plan
    from .spec import ModelSpec
    from .tokenizer import Tokenizer


def seeded(sampling: Sampling, progress: Progress, kept: int | None = None) -> Sampling:
    """``sampling`` with a seed: its own, the one ``kept`` of an earlier run, or one that is drawn,
    and told where it means something."""
    if sampling.seed is None:
        seed = secrets.randbits(32) if kept is None else kept
        sampling = dataclasses.replace(sampling, seed=seed)
        if not sampling.greedy:
            progress.say(f"seed {seed}: --seed {seed} gives the same text again")
    return sampling


def read_text(file: Path, progress: Progress) -> str:
    """The text in ``file``, UTF-8 without its byte order mark; ``-`` is stdin."""
    if str(file) != "-":
        return as_text(file.read_bytes(), show_path(file)).removeprefix("\ufeff")
    if sys.stdin is None:
        raise UsageError("A text should come from stdin, which is closed.", "Name a file.")
    progress.say("reading from stdin")
    return as_text(sys.stdin.buffer.read(), "stdin").removeprefix("\ufeff")


def as_text(data: bytes, name: str) -> str:
    """``data`` as text; raises ``UsageError`` naming the byte that is no UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not UTF-8: byte {error.start} is {data[error.start]:#04x}.",
            "Convert it first (iconv -t UTF-8).",
        ) from error


def open_model(
    model: str,
    size: Callable[[Tokenizer, ModelSpec], dict[str, int | None]],
    how: How,
    progress: Progress,
    layer: Callable[[int, int], None],
) -> Engine:
    """The engine, once every option is known to make sense; ``layer`` is told of each one."""
    from .loading import open_engine
    from .options import Options, Watch
    from .plan_text import lowered, plan_lines

    given = loading_options(how)
    recording = check_trace(how, model)
    Options(**{k: v for k, v in given.items() if v is not None and k != "device"})
    sizes: dict[str, int | None] = {}

    def sized(tokenizer: Tokenizer, spec: ModelSpec) -> dict[str, int | None]:
        sizes.update(size(tokenizer, spec))
        if recording is not None:
            sizes["extra"] = (sizes.get("extra") or 0) + recording(spec, how.sweep, sizes)
        return sizes

    def say_plan(plan: Plan) -> None:
        notes = lowered(plan, given["cache"], sizes.get("sweep"))
        progress.say("\n".join(plan_lines(plan, notes)))

    def loading(done: int, total: int) -> None:
        progress.show(f"loading the trunk: {show_size(done)} of {show_size(total)}")

    def compiling(done: int, total: int) -> None:
        progress.show(f"compiling kernels for the GPU: {done} of {total} layers")

    def warn(text: str) -> None:
        progress.say(f"warning: {text}")

    watch = Watch(say_plan, loading, compiling, layer, warn)
    engine = open_engine(model, sized, watch=watch, **given)
    if how.trace is not None:
        from .trace_record import record

        about = {"version": __version__, "model": model}
        try:
            record(engine, how.trace, how.trace_with or (), about)
        except BaseException:
            engine.close()
            raise
    return engine


def check_trace(
    how: How, model: str
) -> Callable[[ModelSpec, int | None, Mapping[str, int | None]], int] | None:
    """Bytes that recording will take, by spec, ``--sweep`` and sizes of a run; None without it.
    Refuses a trace that cannot be, before anything is loaded."""
    if how.trace is None:
        if how.trace_with:
            raise UsageError("--trace-with names no folder.", "Name it: --trace DIR.")
        return None
    from .trace import new_folder
    from .trace_record import check_parts, needed

    parts = how.trace_with or ()
    check_parts(parts)
    refuse_in_model(how.trace, find_model(model))
    new_folder(how.trace)

    def taken(spec: ModelSpec, sweep: int | None, sizes: Mapping[str, int | None]) -> int:
        sessions = sizes.get("sessions") or 1
        rows = sessions * (sizes.get("context") or spec.context)
        return needed(spec, parts, min(rows, sizes.get("sweep") or sweep or rows), sessions)

    return taken

"""The commands ``bench decode``, ``prefill``, ``batch`` and ``kernels``: parse, call, print."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from .cli_bench_frame import Bench, framed, warnings
from .cli_open import read_text
from .cli_options import (
    Dtype,
    How,
    Isa,
    Kernel,
    Model,
    Threads,
    at_least_one,
    loading_options,
    takes,
    takes_how,
    wanted_kernels,
)
from .config import parse_size
from .machine import default_threads
from .progress import Progress, loading_libraries

Text = Annotated[
    Path | None, typer.Option(help="UTF-8 text; the embedded model's held-out text if unset.")
]
Share = Annotated[
    list[str] | None, typer.Option(help="Part of the experts that has room, like 25%; repeatable.")
]
AloneRam = Annotated[
    str | None,
    typer.Option(help="Memory for the case with all experts in RAM; --ram if unset."),
]
#: options that say nothing here, or that are what is measured
_BUT = ("prefix_dir", "prefix_disk", "trace", "trace_with", "cache")


def add_to(bench: typer.Typer) -> None:
    """Register the commands."""
    bench.command("decode")(decode)
    bench.command("prefill")(prefill)
    bench.command("kernels")(kernels)
    bench.command("batch")(batch)


@takes_how(*_BUT, "predict", "sweep", bench=Bench)
def decode(
    how: How,
    bench: Bench,
    model: Model = "nano",
    share: Share = None,
    predictor: Annotated[
        list[str] | None, typer.Option(help="Repeatable; none and the usual one if unset.")
    ] = None,
    tokens: Annotated[int, typer.Option("-n", "--tokens", help="Steps of a repeat.")] = 24,
    context: Annotated[int, typer.Option(help="Tokens of the prompt before them.")] = 64,
    text: Text = None,
    alone_ram: AloneRam = None,
) -> None:
    """Seconds of a decode step against what bounds it, by cache and predictor."""
    at_least_one(("--tokens", tokens), ("--context", context))
    with Progress() as progress:
        words = None if text is None else read_text(text, progress)
        with loading_libraries(progress):
            from .bench_decode import MEANINGS, PREDICTORS, SHARES, Steps
            from .bench_decode import decode as measure
        options = {**loading_options(how), "watch": warnings(progress)}
        shares, guessing = _shares(share, how, SHARES), list(dict.fromkeys(predictor or PREDICTORS))
        with framed("decode", bench, MEANINGS, progress, model=model) as frame:
            measure(
                frame, model, Steps(tokens, context, words), shares=shares,
                predictors=guessing, alone_ram=_size(alone_ram), **options,
            )  # fmt: skip


@takes_how(*_BUT, bench=Bench)
def prefill(
    how: How,
    bench: Bench,
    model: Model = "nano",
    share: Share = None,
    tokens: Annotated[
        list[int] | None, typer.Option("-n", "--tokens", help="Of a prompt, repeatable; 512.")
    ] = None,
    chunk: Annotated[int | None, typer.Option(help="Compute it so many tokens at a time.")] = None,
    text: Text = None,
    alone_ram: AloneRam = None,
) -> None:
    """Seconds of a prompt against what bounds it, and its arithmetic against torch's."""
    at_least_one(("--chunk", chunk), *(("--tokens", count) for count in tokens or ()))
    with Progress() as progress:
        words = None if text is None else read_text(text, progress)
        with loading_libraries(progress):
            from .bench_prefill import MEANINGS, PROMPT, SHARES
            from .bench_prefill import prefill as measure
        options = {**loading_options(how), "watch": warnings(progress)}
        shares, counts = _shares(share, how, SHARES), list(dict.fromkeys(tokens or (PROMPT,)))
        with framed("prefill", bench, MEANINGS, progress, model=model) as frame:
            measure(
                frame, model, shares=shares, tokens=counts, chunk=chunk, text=words,
                alone_ram=_size(alone_ram), **options,
            )  # fmt: skip


def _shares(given: list[str] | None, how: How, usual: Sequence[str]) -> list[float | None]:
    """Of the experts, each once; what --ram makes of it where only that is given."""
    from .bench_engine import share_of

    if given is None and how.ram is not None:
        return [None]
    return list(dict.fromkeys(share_of(one) for one in given or usual))


def _size(text: str | None) -> int | None:
    return None if text is None else parse_size(text)


class Documents(NamedTuple):
    """What a batch consists of, as it is typed."""

    documents: Annotated[int, typer.Option(help="Documents of a repeat.")] = 16
    solo: Annotated[int, typer.Option(help="Of them that are also computed one by one.")] = 4
    sessions: Annotated[int, typer.Option(help="Most documents at a time.")] = 16
    shortest: Annotated[int, typer.Option(help="Tokens of the shortest document.")] = 40
    longest: Annotated[int, typer.Option(help="Tokens of the longest one.")] = 160
    new: Annotated[int, typer.Option("-n", "--new", help="Tokens of each answer.")] = 16


@takes_how(*_BUT, "sweep", bench=Bench, documents=Documents)
def batch(
    how: How,
    bench: Bench,
    documents: Documents,
    model: Model = "nano",
    share: Share = None,
    text: Text = None,
) -> None:
    """Documents that share sweeps against one after another: bytes, time, the same answers."""
    with Progress() as progress:
        words = None if text is None else read_text(text, progress)
        with loading_libraries(progress):
            from .bench_batch import MEANINGS, SHARES, Work
            from .bench_batch import batch as measure
        options = {**loading_options(how), "watch": warnings(progress)}
        shares = _shares(share, how, SHARES)
        work = Work(**documents._asdict(), text=words)
        with framed("batch", bench, MEANINGS, progress, model=model) as frame:
            measure(frame, model, work, shares=shares, **options)


@takes(bench=Bench)
def kernels(
    bench: Bench,
    widths: Annotated[
        str, typer.Argument(help="A model or a config.json, whose widths count.")
    ] = "released",
    dtype: Dtype = "bfloat16",
    threads: Threads = None,
    kernel: Kernel = None,
    isa: Isa = None,
) -> None:
    """The operators at a model's widths, against a scan of memory and a large torch product."""
    from .options import Options

    Options(dtype=dtype, threads=default_threads() if threads is None else threads)  # refuses
    with Progress() as progress:
        with loading_libraries(progress):
            from .bench_kernels import MEANINGS
            from .bench_kernels import kernels as measure
        with framed("kernels", bench, MEANINGS, progress) as frame:
            measure(
                frame, widths, dtype=dtype, threads=threads, isa=isa,
                kernels=wanted_kernels(kernel),
            )  # fmt: skip

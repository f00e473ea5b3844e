"""The command line: parse, call, print.

Data goes to stdout, everything else to stderr.  Exit 0 fine, 1 failed, 2 wrong usage, 130
interrupted.  ``inspect`` and ``check`` never import torch.
"""

from __future__ import annotations

import dataclasses
import inspect as signatures
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import __version__
from .errors import K3Error, UsageError
from .find import find_model
from .progress import Progress

if TYPE_CHECKING:
    from .engine import Watch

INTERRUPTED = 130

app = typer.Typer(
    help="Run Kimi K3 exactly, inside a memory budget.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

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
Threads = Annotated[
    int | None, typer.Option(envvar="K3_THREADS", help="Compute threads; all processors if unset.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="Text, or - to read it from stdin.")],
    max_new_tokens: Annotated[int, typer.Option("-n", "--max-new-tokens")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text.")] = None,
    ignore_end: Annotated[bool, typer.Option(help="Go on after end tokens.")] = False,
    ram: Ram = None,
    cache: Cache = None,
    dtype: Dtype = "bfloat16",
    sweep: Annotated[int, typer.Option(help="Most prompt tokens in one pass.")] = 512,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Continue PROMPT."""
    with Progress() as progress:
        with _loading_libraries(progress):
            from .engine import open_engine
            from .run_generate import Job, run_generate
            from .sampling import Sampling

        sampling = Sampling(temperature, top_k, top_p, min_p, seed, tuple(stop or ()), ignore_end)
        text = sys.stdin.read() if prompt == "-" else prompt

        def size(tokenizer: Any) -> dict[str, int]:
            ids[:] = tokenizer.encode(text)
            return {
                "context": len(ids) + max(1, max_new_tokens),
                "sweep": min(sweep, max(1, len(ids))),
            }

        ids: list[int] = []
        with open_engine(
            model,
            size,
            ram=ram,
            cache=cache,
            dtype=dtype,
            threads=threads,
            watch=_watch(progress),
        ) as engine:
            fine = run_generate(engine, Job(ids, max_new_tokens, sampling, as_json), progress)
    if not fine:
        raise typer.Exit(1)


@app.command()
def logits(
    model: Model,
    tokens: Annotated[Path, typer.Option(help="Token ids, one-dimensional .npy.")],
    out: Annotated[Path, typer.Option(help="Logits, float32 [T, vocab] .npy.")],
    dtype: Dtype = "bfloat16",
    ram: Ram = None,
    cache: Cache = None,
    sweep: Annotated[int, typer.Option(help="Tokens of each sweep.")] = 512,
    decode_from: Annotated[
        int | None, typer.Option(help="Feed from this token one by one.")
    ] = None,
    last: Annotated[int | None, typer.Option(help="Keep and compute only the last N rows.")] = None,
    routing: Annotated[Path | None, typer.Option(help="Also write chosen experts, .npz.")] = None,
    threads: Threads = None,
) -> None:
    """Write the logits of a token file."""
    for name, value in (("--sweep", sweep), ("--last", last), ("--decode-from", decode_from)):
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}.", "It must be at least 1.")
    with Progress() as progress:
        with _loading_libraries(progress):
            import numpy as np

            from .engine import open_engine
            from .run_logits import Routing, read_tokens, write_logits

        def size(tokenizer: Any) -> dict[str, int]:
            ids[:] = read_tokens(tokens, tokenizer.vocab)
            return {"context": len(ids), "sweep": min(sweep, len(ids))}

        ids: list[int] = []
        with open_engine(
            model,
            size,
            ram=ram,
            cache=cache,
            dtype=dtype,
            threads=threads,
            watch=_watch(progress),
        ) as engine:
            seen = Routing()
            engine.hooks.on_route = seen.watch if routing else None
            step = min(sweep, engine.plan.sweep_rows)
            write_logits(engine, ids, out, sweep=step, decode_from=decode_from, last=last)
            if routing:
                np.savez(routing, allow_pickle=False, **seen.arrays())


@app.command()
def inspect(model: Model, as_json: AsJson = False) -> None:
    """Say what a model folder holds: layers, bytes per group, tiers needed."""
    from .inspect import inspect as look
    from .inspect import render

    facts = look(find_model(model))
    print(json.dumps(facts.to_dict()) if as_json else render(facts))


@app.command()
def check(
    model: Model,
    full: Annotated[bool, typer.Option("--full", help="Read every byte and check values.")] = False,
    as_json: AsJson = False,
) -> None:
    """Verify a model folder; every finding comes with its remedy."""
    from .check import check as verify
    from .check import has_errors
    from .config import show_size

    with Progress() as progress:
        findings = verify(
            find_model(model),
            full,
            lambda done, total: progress.show(f"read {show_size(done)} of {show_size(total)}"),
        )
    if as_json:
        print(json.dumps([finding._asdict() for finding in findings]))
    else:
        for finding in findings:
            print(f"{finding.level}: {finding.what} {finding.remedy}".rstrip())
        print("The model can be run." if not has_errors(findings) else "The model cannot be run.")
    if has_errors(findings):
        raise typer.Exit(1)


def _size_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give ``command`` one option for each field of ``TinySize``, so that none is forgotten."""
    from .tiny_size import CHOICES, TinySize

    own = dict(signatures.signature(command, eval_str=True).parameters)
    del own["overrides"]
    for item in dataclasses.fields(TinySize):
        kind = {"int": int, "float": float, "bool": bool}.get(str(item.type), str)
        wanted = "|".join(CHOICES.get(item.name, ())) or ("3,7,8" if kind is str else None)
        option = typer.Option(metavar=wanted) if wanted else typer.Option()
        own[item.name] = signatures.Parameter(
            item.name,
            signatures.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[kind | None, option],
        )
    command.__signature__ = signatures.Signature(list(own.values()))  # type: ignore[attr-defined]
    command.__annotations__ = {name: p.annotation for name, p in own.items()}
    return command


@app.command("make-tiny")
@_size_options
def make_tiny_command(
    out: Annotated[Path, typer.Argument(help="Folder to write; made if absent.")],
    size: Annotated[
        str, typer.Option(help="A size by name; the options below change it.")
    ] = "nano",
    seed: int = 0,
    full: Annotated[bool, typer.Option("--full", help="The released configuration.")] = False,
    sparse: Annotated[bool, typer.Option("--sparse", help="Large tensors as holes.")] = False,
    **overrides: Any,
) -> None:
    """Write a seeded synthetic checkpoint in the released layout into OUT."""
    from .config import show_size
    from .make_tiny import make_tiny, make_tiny_full

    given = {name: value for name, value in overrides.items() if value is not None}
    if "mla_layers" in given:
        given["mla_layers"] = tuple(int(i) for i in given["mla_layers"].split(","))
    if full != sparse:
        raise UsageError("--full and --sparse go together.", "Give both or neither.")
    if full and (given or size != "nano"):
        raise UsageError("--full takes no sizes.", "It is the released configuration.")
    with Progress() as progress:

        def show(name: str, done: int, total: int) -> None:
            progress.show(f"{name}: {show_size(done)} of {show_size(total)}")

        if full:
            made = make_tiny_full(out, seed, show)
        else:
            made = make_tiny(out, size, seed, progress=show, **given)
    print(json.dumps({k: v for k, v in made.items() if k != "sha256"}))


@contextmanager
def _loading_libraries(progress: Progress) -> Iterator[None]:
    """Say so; meanwhile Ctrl-C leaves at once, since an import may swallow an interrupt."""

    def leave(number: int, frame: Any) -> None:
        os.write(2, b"\ninterrupted\n")
        os._exit(INTERRUPTED)

    progress.say("loading libraries")
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    ours = main and before is signal.default_int_handler  # not where a caller ignores it
    if ours:
        signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)


def _watch(progress: Progress) -> Watch:
    from .config import show_size
    from .engine import Watch
    from .report import plan_lines

    return Watch(
        plan=lambda plan: progress.say("\n".join(plan_lines(plan))),
        loading=lambda done, total: progress.show(
            f"loading the trunk: {show_size(done)} of {show_size(total)}"
        ),
        layer=lambda layer, layers: progress.show(f"layer {layer + 1} of {layers}"),
        warn=lambda text: progress.say(f"warning: {text}"),
    )


def _version(value: bool) -> None:
    if value:
        print(__version__)
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    pass


def main(arguments: list[str] | None = None) -> None:
    """Entry point: runs a command and turns errors into one line and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # any locale: text leaves as UTF-8
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        code = app(arguments, prog_name="k3offload", standalone_mode=False)
    except K3Error as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        sys.exit(1)
    except Exception as error:
        if not hasattr(error, "show"):  # the parser's own errors can print themselves
            raise
        error.show()
        sys.exit(2)
    if code == INTERRUPTED:  # some versions of the parser return it, some raise
        print("\ninterrupted", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)

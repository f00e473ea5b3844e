"""The command line: parse, call, print.

Data goes to stdout, everything else to stderr.  Exit 0 fine, 1 failed, 2 wrong usage, 130
interrupted.  ``inspect`` and ``check`` never import torch.
"""

from __future__ import annotations

import dataclasses
import errno
import inspect as signatures
import json
import os
import re
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from . import __version__
from .config import ROW_TILE, align_up, parse_size, show_size
from .errors import K3Error, UsageError
from .find import find_model, find_outputs
from .paths import show_path
from .progress import (
    INTERRUPTED,
    Meter,
    Progress,
    failed,
    last_words,
    let_go,
    loading_libraries,
    steady_streams,
    write_out,
)

if TYPE_CHECKING:
    from .engine import Engine
    from .scheduler.plan import Plan
    from .spec import ModelSpec
    from .tokenizer import Tokenizer

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

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
    _at_least_one(("-n", max_new_tokens), ("--sweep", sweep))
    with Progress() as progress:
        text = _prompt(prompt, progress)
        with loading_libraries(progress):
            from .run_generate import Job, run_generate
            from .sampling import Sampling

        sampling = Sampling(temperature, top_k, top_p, min_p, seed, tuple(stop or ()), ignore_end)
        if seed is None and not sampling.greedy:
            sampling = dataclasses.replace(sampling, seed=secrets.randbits(32))
            progress.say(f"seed {sampling.seed}: --seed {sampling.seed} gives the same text again")
        ids: list[int] = []

        def size(tokenizer: Tokenizer, spec: ModelSpec) -> dict[str, int]:
            ids[:] = tokenizer.encode(text)
            _check_context(spec, len(ids), max_new_tokens)
            rows = min(sweep, align_up(len(ids), ROW_TILE))
            return {"context": len(ids) + max_new_tokens, "sweep": rows}

        meter, how = Meter(progress.show), _How(ram, cache, dtype, sweep, threads)
        with _open(model, size, how, progress, meter) as engine:
            job = Job(ids, max_new_tokens, sampling, as_json)
            fine = run_generate(engine, job, progress, meter)
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
    _at_least_one(("--sweep", sweep), ("--last", last), ("--decode-from", decode_from))
    place, routing_place = find_outputs(model, tokens, out, routing)
    with Progress() as progress:
        with loading_libraries(progress):
            from .run_logits import Routing, read_tokens, write_logits
        ids: list[int] = []

        def size(tokenizer: Tokenizer, spec: ModelSpec) -> dict[str, int]:
            ids[:] = read_tokens(tokens, tokenizer.vocab)
            _check_context(spec, len(ids), 0)
            rows = min(sweep, align_up(len(ids), ROW_TILE))
            extra = Routing.size(spec, len(ids)) if routing else 0
            return {"context": len(ids), "sweep": rows, "extra": extra}

        meter, how = Meter(progress.show), _How(ram, cache, dtype, sweep, threads)
        with _open(model, size, how, progress, meter) as engine:
            seen = Routing(engine.spec, len(ids)) if routing_place else None
            engine.hooks.on_route = seen.watch if seen else None
            write_logits(
                engine, ids, place, sweep=sweep, decode_from=decode_from, last=last, meter=meter
            )
            if seen and routing_place:
                seen.write(routing_place)


@app.command()
def inspect(model: Model, as_json: AsJson = False) -> None:
    """Say what a model folder holds: layers, bytes per group, tiers needed."""
    from .inspect import inspect as look
    from .inspect import render

    facts = look(find_model(model))
    write_out(json.dumps(facts.to_dict()) if as_json else render(facts))


@app.command()
def check(
    model: Model,
    full: Annotated[bool, typer.Option("--full", help="Read every byte and check values.")] = False,
    as_json: AsJson = False,
) -> None:
    """Verify a model folder; every finding comes with its remedy."""
    from .check import check as verify
    from .check import has_errors

    with Progress() as progress:
        findings = verify(
            find_model(model),
            full,
            lambda done, total: progress.show(f"read {show_size(done)} of {show_size(total)}"),
        )
    if as_json:
        write_out(json.dumps([finding._asdict() for finding in findings]))
    else:
        for finding in findings:
            write_out(f"{finding.level}: {finding.what} {finding.remedy}".rstrip())
        write_out(
            "The model can be run." if not has_errors(findings) else "The model cannot be run."
        )
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
    from .make_tiny import make_tiny, make_tiny_full

    given = {name: value for name, value in overrides.items() if value is not None}
    if "mla_layers" in given:
        given["mla_layers"] = _layers(given["mla_layers"])
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
    write_out(json.dumps({k: v for k, v in made.items() if k != "sha256"}))


def _layers(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text, re.ASCII):
        raise UsageError(f"--mla-layers {text!r} is no list of layers.", "Write it like 3,7,8.")
    return tuple(map(int, text.split(",")))


class _How(NamedTuple):
    """The options of loading a model, as they were typed."""

    ram: str | None
    cache: str | None
    dtype: str
    sweep: int
    threads: int | None


def _open(
    model: str,
    size: Callable[[Tokenizer, ModelSpec], dict[str, int]],
    how: _How,
    progress: Progress,
    meter: Meter,
) -> Engine:
    """The engine, once every option is known to make sense."""
    from .engine import Options, Watch, open_engine
    from .report import lowered, plan_lines

    ram = None if how.ram is None else parse_size(how.ram)
    cache = None if how.cache is None else parse_size(how.cache)
    rest: dict[str, Any] = {"ram": ram, "cache": cache, "dtype": how.dtype}
    if how.threads is not None:
        rest["threads"] = how.threads
    Options(sweep=how.sweep, **rest)
    sizes: dict[str, int] = {}

    def sized(tokenizer: Tokenizer, spec: ModelSpec) -> dict[str, int]:
        sizes.update(size(tokenizer, spec))
        return sizes

    def say_plan(plan: Plan) -> None:
        notes = lowered(plan, cache, sizes["sweep"])
        progress.say("\n".join(plan_lines(plan, notes)))

    def loading(done: int, total: int) -> None:
        progress.show(f"loading the trunk: {show_size(done)} of {show_size(total)}")

    watch = Watch(say_plan, loading, meter.layer, lambda text: progress.say(f"warning: {text}"))
    return open_engine(model, sized, watch=watch, **rest)


def _at_least_one(*given: tuple[str, int | None]) -> None:
    for name, value in given:
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}.", "It must be at least 1.")


def _prompt(given: str, progress: Progress) -> str:
    """The prompt, from stdin if it is ``-``; raises ``UsageError`` if it is empty or no UTF-8."""
    if given == "-":
        if sys.stdin is None:
            raise UsageError("The prompt should come from stdin, which is closed.", "Give a text.")
        progress.say("reading the prompt from stdin")
        data = sys.stdin.buffer.read()
    else:
        data = given.encode("utf-8", "surrogateescape")  # bytes of the command line as they were
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"The prompt is not UTF-8: byte {error.start} is {data[error.start]:#04x}.",
            "Convert it first (iconv -t UTF-8).",
        ) from error
    if not text:
        raise UsageError("The prompt is empty.", "Give at least one character.")
    return text


def _check_context(spec: ModelSpec, prompt: int, more: int) -> None:
    if prompt + more > spec.context:
        wanted = f"{prompt:,} tokens" + (f" of prompt and {more:,} more" if more else "")
        raise UsageError(
            f"{wanted} exceed the model's context of {spec.context:,}.",
            "Shorten the prompt or ask for fewer tokens." if more else "Give fewer tokens.",
        )


def _version(value: bool) -> None:
    if value:
        write_out(__version__)
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    pass


def main(arguments: list[str] | None = None) -> None:
    """Entry point: runs a command and turns errors into one line and an exit code."""
    steady_streams()
    code: Any = 0
    try:
        if sys.stdout is None:
            raise K3Error("stdout is closed.", "Send it to a file or to /dev/null.")
        code = app(arguments, prog_name="k3offload", standalone_mode=False)
    except K3Error as error:
        code = failed(str(error), 2 if isinstance(error, UsageError) else 1)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        code = 1
    except OSError as error:
        named_one = isinstance(error.filename, str | os.PathLike)
        place = f"{show_path(error.filename)}: " if named_one else ""
        remedy = "Make room or choose another place." if error.errno in _FULL else "Check the path."
        code = failed(f"{place}{error.strerror or error}. {remedy if place else ''}".rstrip(), 1)
    except UnicodeError as error:
        code = failed(f"{error}.", 1)
    except Exception as error:
        if not hasattr(error, "format_message"):  # the parser's own errors have it
            raise
        code = _misused(error)
    if code == INTERRUPTED:  # some versions of the parser return it, some raise
        last_words("\ninterrupted")
    let_go()
    sys.exit(code if isinstance(code, int) else 0)


def _misused(error: Any) -> int:
    """What the parser has to say, in one line; without any command that is the whole help."""
    text, context = error.format_message(), getattr(error, "ctx", None)
    if "\n" in text:
        last_words(text)
        return 2
    command = context.command_path if context else "k3offload"
    end = "" if text.endswith((".", "?", "!")) else "."
    return failed(f"{text}{end} See {command} --help.", 2)

"""The commands that run a model: generate and logits."""

from __future__ import annotations

import dataclasses
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .cli_options import (
    AdaptiveBackend,
    AsJson,
    Cache,
    Device,
    Dtype,
    ExpertsOn,
    How,
    Isa,
    Kernel,
    Latents,
    Model,
    Policy,
    Predict,
    Ram,
    Scratch,
    Summaries,
    Sweep,
    Threads,
    Trunk,
    TrunkOn,
    Vram,
    at_least_one,
    kernels_of,
)
from .config import parse_size, show_size
from .errors import UsageError
from .find import find_outputs
from .progress import Meter, Progress, loading_libraries

if TYPE_CHECKING:
    from .engine import Engine
    from .scheduler.plan import Plan
    from .spec import ModelSpec
    from .tokenizer import Tokenizer


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command()(generate)
    app.command()(logits)


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
    trunk: Trunk = None,
    sweep: Sweep = None,
    threads: Threads = None,
    kernel: Kernel = None,
    isa: Isa = None,
    policy: Policy = None,
    predict: Predict = None,
    device: Device = "auto",
    vram: Vram = None,
    experts_on: ExpertsOn = None,
    trunk_on: TrunkOn = None,
    adaptive_backend: AdaptiveBackend = False,
    latents: Latents = None,
    summaries: Summaries = None,
    scratch: Scratch = None,
    as_json: AsJson = False,
) -> None:
    """Continue PROMPT."""
    at_least_one(("-n", max_new_tokens), ("--sweep", sweep))
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

        def size(tokenizer: Tokenizer, spec: ModelSpec) -> dict[str, int | None]:
            ids[:] = tokenizer.encode(text)
            _check_context(spec, len(ids), max_new_tokens)
            return _sizes(len(ids), max_new_tokens, sweep)

        meter = Meter(progress.show)
        how = How(
            ram, cache, dtype, trunk, sweep, threads, kernel, isa, policy, predict, device, vram,
            experts_on, trunk_on, adaptive_backend, latents, summaries, scratch,
        )  # fmt: skip
        with _open(model, size, how, progress, meter) as engine:
            job = Job(ids, max_new_tokens, sampling, as_json)
            fine = run_generate(engine, job, progress, meter)
    if not fine:
        raise typer.Exit(1)


def logits(
    model: Model,
    tokens: Annotated[Path, typer.Option(help="Token ids, one-dimensional .npy.")],
    out: Annotated[Path, typer.Option(help="Logits, float32 [T, vocab] .npy.")],
    ram: Ram = None,
    cache: Cache = None,
    dtype: Dtype = "bfloat16",
    trunk: Trunk = None,
    sweep: Sweep = None,
    threads: Threads = None,
    kernel: Kernel = None,
    isa: Isa = None,
    policy: Policy = None,
    predict: Predict = None,
    device: Device = "auto",
    vram: Vram = None,
    experts_on: ExpertsOn = None,
    trunk_on: TrunkOn = None,
    adaptive_backend: AdaptiveBackend = False,
    latents: Latents = None,
    summaries: Summaries = None,
    scratch: Scratch = None,
    decode_from: Annotated[
        int | None, typer.Option(help="Feed from this token one by one.")
    ] = None,
    last: Annotated[int | None, typer.Option(help="Keep and compute only the last N rows.")] = None,
    routing: Annotated[Path | None, typer.Option(help="Also write chosen experts, .npz.")] = None,
) -> None:
    """Write the logits of a token file."""
    at_least_one(("--sweep", sweep), ("--last", last), ("--decode-from", decode_from))
    place, routing_place = find_outputs(model, tokens, out, routing)
    with Progress() as progress:
        with loading_libraries(progress):
            from .run_logits import Routing, read_tokens, write_logits
        ids: list[int] = []

        def size(tokenizer: Tokenizer, spec: ModelSpec) -> dict[str, int | None]:
            ids[:] = read_tokens(tokens, tokenizer.vocab)
            _check_context(spec, len(ids), 0)
            extra = Routing.size(spec, len(ids)) if routing else 0
            decoded = 0 if decode_from is None else max(0, len(ids) - decode_from)
            return _sizes(len(ids) - decoded, decoded, sweep) | {"extra": extra}

        meter = Meter(progress.show)
        how = How(
            ram, cache, dtype, trunk, sweep, threads, kernel, isa, policy, predict, device, vram,
            experts_on, trunk_on, adaptive_backend, latents, summaries, scratch,
        )  # fmt: skip
        with _open(model, size, how, progress, meter) as engine:
            seen = Routing(engine.spec, len(ids)) if routing_place else None
            if seen:
                engine.hooks.on_route = seen.watch
            write_logits(
                engine, ids, place, sweep=sweep, decode_from=decode_from, last=last, meter=meter
            )
            if seen and routing_place:
                seen.write(routing_place)


def _open(
    model: str,
    size: Callable[[Tokenizer, ModelSpec], dict[str, int | None]],
    how: How,
    progress: Progress,
    meter: Meter,
) -> Engine:
    """The engine, once every option is known to make sense."""
    from .loading import open_engine
    from .options import Options, Watch
    from .plan_text import lowered, plan_lines

    ram = None if how.ram is None else parse_size(how.ram)
    cache = None if how.cache is None else parse_size(how.cache)
    rest: dict[str, Any] = {"ram": ram, "cache": cache, "dtype": how.dtype, "trunk": how.trunk}
    rest.update(kernels=kernels_of(how.kernel), isa=how.isa, experts_on=how.experts_on)
    rest.update(trunk_on=how.trunk_on, adaptive=how.adaptive)
    for name in ("vram", "latents", "summaries"):
        given = getattr(how, name)
        rest[name] = None if given is None else parse_size(given)
    rest["scratch"] = how.scratch
    rest.update({k: v for k in ("policy", "predict") if (v := getattr(how, k)) is not None})
    if how.threads is not None:
        rest["threads"] = how.threads
    Options(sweep=how.sweep, **rest)
    sizes: dict[str, int | None] = {}

    def sized(tokenizer: Tokenizer, spec: ModelSpec) -> dict[str, int | None]:
        sizes.update(size(tokenizer, spec))
        return sizes

    def say_plan(plan: Plan) -> None:
        notes = lowered(plan, cache, sizes["sweep"])
        progress.say("\n".join(plan_lines(plan, notes)))

    def loading(done: int, total: int) -> None:
        progress.show(f"loading the trunk: {show_size(done)} of {show_size(total)}")

    def compiling(done: int, total: int) -> None:
        progress.show(f"compiling kernels for the GPU: {done} of {total} layers")

    def warn(text: str) -> None:
        progress.say(f"warning: {text}")

    watch = Watch(say_plan, loading, compiling, meter.layer, warn)
    return open_engine(model, sized, watch=watch, device=how.device, **rest)


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


def _sizes(prompt: int, answer: int, sweep: int | None) -> dict[str, int | None]:
    """What is to be planned for a prompt and an answer of so many tokens."""
    rows = None if sweep is None else min(sweep, max(1, prompt))
    return {"context": prompt + answer, "answer": answer, "sweep": rows}


def _check_context(spec: ModelSpec, prompt: int, more: int) -> None:
    if prompt + more > spec.context:
        wanted = f"{prompt:,} tokens" + (f" of prompt and {more:,} more" if more else "")
        raise UsageError(
            f"{wanted} exceed the model's context of {spec.context:,}.",
            "Shorten the prompt or ask for fewer tokens." if more else "Give fewer tokens.",
        )

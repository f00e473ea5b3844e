"""The commands that run a model: generate and logits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from .cli_open import as_text, open_model, read_text, seeded
from .cli_options import (
    AsJson,
    Choice,
    How,
    Model,
    Prompt,
    PromptFile,
    SessionFolder,
    at_least_one,
    takes_how,
)
from .errors import UsageError
from .find import find_model, find_outputs
from .progress import Meter, Progress, loading_libraries
from .session_manifest import MANIFEST, check_place, read_manifest

if TYPE_CHECKING:
    from .spec import ModelSpec
    from .tokenizer import Tokenizer


class _Held(NamedTuple):
    """Tokens of a saved session, and how many of them are computed."""

    tokens: int = 0
    computed: int = 0


_NONE = _Held()


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command()(generate)
    app.command()(logits)


@takes_how(choice=Choice)
def generate(
    how: How,
    choice: Choice,
    model: Model,
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    session: SessionFolder = None,
    max_new_tokens: Annotated[int, typer.Option("-n", "--max-new-tokens")] = 256,
    as_json: AsJson = False,
) -> None:
    """Continue PROMPT."""
    at_least_one(("-n", max_new_tokens), ("--sweep", how.sweep))
    with Progress() as progress:
        held = _held(session, model, progress)
        text = _prompt(prompt, prompt_file, bool(held.tokens), progress)
        with loading_libraries(progress):
            from .run_generate import Job, run_generate
        sampling = choice.sampling()
        if not sampling.greedy:
            sampling = seeded(sampling, progress)
        ids: list[int] = []

        def size(tokenizer: Tokenizer, spec: ModelSpec) -> dict[str, int | None]:
            ids[:] = tokenizer.encode(text)
            spec.check_context(held.tokens + len(ids), max_new_tokens)
            return _sizes(len(ids), max_new_tokens, how.sweep, held)

        meter = Meter(progress.show)
        with open_model(model, size, how, progress, meter.layer) as engine:
            meter.read = lambda: engine.disk.counts.bytes
            job = Job(ids, max_new_tokens, sampling, as_json, session, bool(held.tokens))
            fine = run_generate(engine, job, progress, meter)
    if not fine:
        raise typer.Exit(1)


@takes_how("prefix_dir", "prefix_disk")
def logits(
    how: How,
    model: Model,
    tokens: Annotated[Path, typer.Option(help="Token ids, one-dimensional .npy.")],
    out: Annotated[Path, typer.Option(help="Logits, float32 [T, vocab] .npy.")],
    decode_from: Annotated[
        int | None, typer.Option(help="Feed from this token one by one.")
    ] = None,
    last: Annotated[int | None, typer.Option(help="Keep and compute only the last N rows.")] = None,
    routing: Annotated[Path | None, typer.Option(help="Also write chosen experts, .npz.")] = None,
) -> None:
    """Write the logits of a token file."""
    at_least_one(("--sweep", how.sweep), ("--last", last), ("--decode-from", decode_from))
    place, routing_place = find_outputs(model, tokens, out, routing)
    with Progress() as progress:
        with loading_libraries(progress):
            from .run_logits import Routing, read_tokens, write_logits
        ids: list[int] = []

        def size(tokenizer: Tokenizer, spec: ModelSpec) -> dict[str, int | None]:
            ids[:] = read_tokens(tokens, tokenizer.vocab)
            spec.check_context(len(ids))
            extra = Routing.size(spec, len(ids)) if routing else 0
            decoded = 0 if decode_from is None else max(0, len(ids) - decode_from)
            return _sizes(len(ids) - decoded, decoded, how.sweep) | {"extra": extra}

        meter = Meter(progress.show)
        with open_model(model, size, how, progress, meter.layer) as engine:
            meter.read = lambda: engine.disk.counts.bytes
            seen = Routing(engine.spec, len(ids)) if routing_place else None
            if seen:
                engine.hooks.on_route = seen.watch
            write_logits(
                engine, ids, place, sweep=how.sweep, decode_from=decode_from, last=last, meter=meter
            )
            if seen and routing_place:
                seen.write(routing_place)


def _held(session: Path | None, model: str, progress: Progress) -> _Held:
    """What the folder ``session`` holds; nothing where none is saved yet.

    Raises ``UsageError`` for a place where nothing can be saved, ``SessionError`` for a damaged
    one.
    """
    if session is None:
        return _NONE
    check_place(session, find_model(model))
    if os.path.lexists(session / MANIFEST):
        manifest = read_manifest(session)
        return _Held(manifest.tokens, manifest.position)
    if session.is_dir() and any(session.iterdir()):
        progress.say(f"warning: {session} holds a save that was never finished; it is replaced")
    return _NONE


def _prompt(given: str | None, file: Path | None, held: bool, progress: Progress) -> str:
    """The prompt; raises ``UsageError`` if it is given twice, no UTF-8, or empty where nothing is
    ``held`` to go on with."""
    if given is not None and file is not None:
        raise UsageError("There are two prompts.", "Give PROMPT or --prompt-file.")
    if file is None and given == "-":
        file = Path("-")
    if file is not None:
        text = read_text(file, progress)
    else:  # bytes of the command line as they were
        text = as_text((given or "").encode("utf-8", "surrogateescape"), "The prompt")
    if not text and not held:
        raise UsageError("The prompt is empty.", "Give at least one character.")
    return text


def _sizes(
    prompt: int, answer: int, sweep: int | None, held: _Held = _NONE
) -> dict[str, int | None]:
    """What is to be planned for a prompt and an answer of so many tokens behind ``held``."""
    every = held.tokens + prompt
    rows = None if sweep is None else min(sweep, max(1, every - held.computed))
    return {"context": every + answer, "answer": answer, "sweep": rows, "held": held.computed}

"""The command ``batch``: parse, call, print."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from . import __version__
from .batch_records import MANIFEST
from .cli_open import open_model, seeded
from .cli_options import AsJson, How, Model, at_least_one, takes_how
from .constrain import Grammar
from .documents import SUFFIXES, count_documents, read_documents
from .errors import UsageError
from .find import find_model
from .progress import Progress, loading_libraries, write_out
from .sampling import Sampling
from .session_manifest import refuse_in_model

if TYPE_CHECKING:
    from .engine import Engine
    from .spec import ModelSpec
    from .tokenizer import Tokenizer

SOME_FAILED = 3  #: exit code: all documents have a record, and some of these are errors


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(batch)


@takes_how("sweep")
def batch(
    how: How,
    model: Model,
    inputs: Annotated[str, typer.Argument(help="Folder, pattern, text, JSONL, CSV or Parquet.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="A line of JSON for each document.")],
    prompt: Annotated[str, typer.Option(help="What a document is put into.")] = "{text}",
    prompt_file: Annotated[Path | None, typer.Option(help="The same as a UTF-8 file.")] = None,
    max_new_tokens: Annotated[int, typer.Option("-n", "--max-new-tokens")] = 256,
    context: Annotated[int, typer.Option(help="Most tokens of a prompt and its answer.")] = 4096,
    sessions: Annotated[
        int, typer.Option(help="Documents at a time, at most; as many as let each read least.")
    ] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same texts.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text.")] = None,
    ignore_end: Annotated[bool, typer.Option(help="Go on after end tokens.")] = False,
    schema: Annotated[
        Path | None, typer.Option(help="JSON schema, a file; every answer follows it.")
    ] = None,
    id_field: Annotated[str | None, typer.Option(help="Column that names a document.")] = None,
    text_field: Annotated[str | None, typer.Option(help="Column of its text.")] = None,
    kind: Annotated[
        str | None, typer.Option(help=f"text, {', '.join(sorted(set(SUFFIXES.values())))}.")
    ] = None,
    completed: Annotated[bool, typer.Option(help="Leave lines in the order of their end.")] = False,
    resume: Annotated[bool, typer.Option(help="Go on with OUT; what is done stays.")] = False,
    save_every: Annotated[
        float, typer.Option(help="Seconds between saves of answers under way; 0 is never.")
    ] = 600.0,
    overwrite: Annotated[bool, typer.Option(help="Replace OUT.")] = False,
    json_progress: Annotated[bool, typer.Option(help="Progress as JSON on stdout.")] = False,
    as_json: AsJson = False,
) -> None:
    """Answer every document of INPUTS; exit 3 if some of them failed."""
    at_least_one(("-n", max_new_tokens), ("--context", context), ("--sessions", sessions))
    template = _template(prompt, prompt_file)
    if out.is_dir():
        raise UsageError(f"{out} is a folder.", "Name a file, like OUT.jsonl.")
    refuse_in_model(out, find_model(model))
    with Progress() as progress:
        documents = read_documents(inputs, id_field=id_field, text_field=text_field, kind=kind)
        with loading_libraries(progress):
            from .batch import around
            from .batch_records import Records
            from .run_batch import BatchMeter, Task, run_batch
        around(template)
        stops = tuple(stop or ())
        grammar = None if schema is None else Grammar.of_schema(_text(schema))
        sampling = Sampling(temperature, top_k, top_p, min_p, seed, stops, ignore_end, grammar)
        if resume and seed is None:
            sampling = replace(sampling, seed=_seed_of(out))
        task = Task(template, max_new_tokens, seeded(sampling, progress))
        meter = BatchMeter(progress, count_documents(inputs, kind=kind), json_progress)

        def size(tokenizer: Tokenizer, spec: ModelSpec) -> dict[str, int | None]:
            head = tokenizer.encode(template)
            spec.check_context(len(head), max_new_tokens)
            answer = min(max_new_tokens, context - 1)
            return {"context": context, "sessions": sessions, "fewer": True, "answer": answer}

        def begin(engine: Engine) -> dict[str, Any]:
            return _about(engine, model, inputs, task.prompt, task.options())

        with open_model(model, size, how, progress, meter.layer) as engine:
            progress.say(f"{engine.options.sessions} documents at a time")
            kept: Literal["input", "completed"] = "completed" if completed else "input"
            with Records.open(
                out, begin(engine), resume=resume, overwrite=overwrite, order=kept,
                warn=lambda text: progress.say(f"warning: {text}"),
            ) as records:  # fmt: skip
                counts = run_batch(engine, documents, task, records, progress, meter, save_every)
        facts = meter.facts()
        progress.clear()
        if as_json or json_progress:
            write_out(json.dumps({**facts, "records": counts}))
        else:
            progress.say(meter.line())
            progress.say(f"{counts['done']:,} records in {out}, {counts['failed']:,} of errors")
    if counts["failed"]:
        raise typer.Exit(SOME_FAILED)


def _template(prompt: str, file: Path | None) -> str:
    """The prompt with its place for a document."""
    if file is None:
        return prompt
    if prompt != "{text}":
        raise UsageError("There are two prompts.", "Give --prompt or --prompt-file.")
    return _text(file)


def _seed_of(out: Path) -> int | None:
    """The seed of the run that wrote ``out``, so that a seed that was drawn is not drawn anew."""
    try:
        seed = json.loads(out.with_name(out.name + MANIFEST).read_bytes())["options"]["seed"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return seed if isinstance(seed, int) else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 at byte {error.start}.", "Convert it.") from error


def _about(
    engine: Engine, model: str, inputs: str, prompt: str, options: dict[str, Any]
) -> dict[str, Any]:
    """What the manifest says of the run."""
    from .machine import read_machine
    from .session_identity import identity

    machine = read_machine()
    return {
        "version": __version__,
        "model": identity(engine),
        "folder": model,
        "prompt": prompt,
        "options": options,
        "input": inputs,
        "machine": {"memory": machine.physical, "threads": engine.options.threads},
        "plan": dict(engine.plan.purposes),
    }

"""The command ``batch``: parse, call, print."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from . import __version__
from .batch_file import refuse
from .batch_records import MANIFEST, SAVE_EVERY
from .cli_open import open_model, seeded
from .cli_options import AsJson, Choice, How, Model, at_least_one, takes_how
from .constrain import Grammar, constraint
from .documents import SUFFIXES, Document, count_documents, read_documents
from .errors import UsageError
from .find import find_model
from .progress import Progress, loading_libraries, write_out
from .session_manifest import refuse_in_model

if TYPE_CHECKING:
    from .batch_meter import BatchMeter
    from .engine import Engine
    from .run_batch import Task
    from .spec import ModelSpec
    from .tokenizer import Tokenizer

SOME_FAILED = 3  #: exit code: all documents have a record, and some of these are errors


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(batch)


class Ask(NamedTuple):
    """What is asked of every document."""

    prompt: Annotated[str, typer.Option(help="What a document is put into.")] = "{text}"
    prompt_file: Annotated[Path | None, typer.Option(help="The same as a UTF-8 file.")] = None
    max_new_tokens: Annotated[int, typer.Option("-n", "--max-new-tokens")] = 256
    context: Annotated[int, typer.Option(help="Most tokens of a prompt and its answer.")] = 4096
    sessions: Annotated[
        int, typer.Option(help="Documents at a time, at most; as many as let each read least.")
    ] = 64
    schema: Annotated[
        Path | None, typer.Option(help="JSON schema, a file; every answer follows it.")
    ] = None


class Columns(NamedTuple):
    """Where documents stand in the input."""

    id_field: Annotated[str | None, typer.Option(help="Column that names a document.")] = None
    text_field: Annotated[str | None, typer.Option(help="Column of its text.")] = None
    kind: Annotated[
        str | None, typer.Option(help=f"text, {', '.join(sorted(set(SUFFIXES.values())))}.")
    ] = None


class Output(NamedTuple):
    """What is done with OUT, and what is said meanwhile."""

    completed: Annotated[bool, typer.Option(help="Leave lines in the order of their end.")] = False
    resume: Annotated[bool, typer.Option(help="Go on with OUT; what is done stays.")] = False
    overwrite: Annotated[bool, typer.Option(help="Replace OUT.")] = False
    save_every: Annotated[
        float, typer.Option(help="Seconds between saves of answers under way; 0 is never.")
    ] = SAVE_EVERY
    json_progress: Annotated[bool, typer.Option(help="Progress as JSON on stdout.")] = False
    as_json: AsJson = False


@takes_how("sweep", ask=Ask, choice=Choice, columns=Columns, output=Output)
def batch(
    how: How,
    ask: Ask,
    choice: Choice,
    columns: Columns,
    output: Output,
    model: Model,
    inputs: Annotated[str, typer.Argument(help="Folder, pattern, text, JSONL, CSV or Parquet.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="A line of JSON for each document.")],
) -> None:
    """Answer every document of INPUTS; exit 3 if some of them failed."""
    at_least_one(("-n", ask.max_new_tokens), ("--context", ask.context))
    at_least_one(("--sessions", ask.sessions))
    template, path = _template(ask), _path(out, model, output)
    if ask.max_new_tokens >= ask.context:
        raise UsageError(
            f"-n {ask.max_new_tokens} leaves no room in --context {ask.context}.", "Raise it."
        )
    with Progress() as progress:
        documents = read_documents(inputs, **columns._asdict(), but=path)
        with loading_libraries(progress):
            from .batch import around
            from .batch_meter import BatchMeter
            from .run_batch import Task
        around(template)
        grammar = None if ask.schema is None else Grammar.of_schema(_text(ask.schema))
        # also where it is greedy: a document may ask for a temperature of its own
        kept = _seed_of(path) if output.resume else None
        sampling = seeded(choice.sampling(grammar), progress, kept)
        task = Task(template, ask.max_new_tokens, sampling)
        total = count_documents(inputs, kind=columns.kind, but=path)
        meter = BatchMeter(progress, total, output.json_progress)

        def size(tokenizer: Tokenizer, spec: ModelSpec) -> dict[str, int | None]:
            spec.check_context(len(tokenizer.encode(template)), ask.max_new_tokens)
            if grammar is not None:  # refused now; and what it takes is counted in the plan
                constraint(tokenizer, grammar)
            answer = {"answer": ask.max_new_tokens, "fewer": True}
            return {"context": ask.context, "sessions": ask.sessions, **answer}

        with open_model(model, size, how, progress, meter.layer) as engine:
            about = _about(engine, model, inputs, task)
            counts = _run(engine, documents, task, path, about, output, progress, meter)
        progress.clear()
        if output.as_json or output.json_progress:
            write_out(json.dumps({**meter.facts(), "records": counts}))
        else:
            progress.say(meter.line())
            progress.say(f"{counts['done']:,} records in {out}, {counts['failed']:,} of errors")
    if counts["failed"]:
        raise typer.Exit(SOME_FAILED)


def _run(
    engine: Engine,
    documents: Iterator[Document],
    task: Task,
    path: Path,
    about: dict[str, Any],
    output: Output,
    progress: Progress,
    meter: BatchMeter,
) -> dict[str, int]:
    from .batch_records import Records
    from .run_batch import run_batch

    progress.say(f"{engine.options.sessions} documents at a time")
    with Records.open(
        path, about, resume=output.resume, overwrite=output.overwrite,
        order="completed" if output.completed else "input",
        warn=lambda text: progress.say(f"warning: {text}"),
    ) as records:  # fmt: skip
        return run_batch(
            engine, documents, task, records, progress, meter, about["model"], output.save_every
        )


def _path(out: Path, model: str, output: Output) -> Path:
    """Where the records go, links resolved; refused before anything is loaded."""
    if not output.save_every >= 0:
        raise UsageError(f"--save-every is {output.save_every}.", "It must be 0 or more seconds.")
    if output.resume and output.overwrite:
        raise UsageError("--resume and --overwrite exclude each other.", "Leave one out.")
    refuse_in_model(out, find_model(model))
    path = Path(os.path.realpath(out))
    refuse(path, output.resume or output.overwrite)
    return path


def _template(ask: Ask) -> str:
    """The prompt with its place for a document."""
    if ask.prompt_file is None:
        return ask.prompt
    if ask.prompt != "{text}":
        raise UsageError("There are two prompts.", "Give --prompt or --prompt-file.")
    return _text(ask.prompt_file)


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


def _about(engine: Engine, model: str, inputs: str, task: Task) -> dict[str, Any]:
    """What the manifest says of the run."""
    from .machine import read_machine
    from .session_identity import identity

    return {
        "version": __version__,
        "model": identity(engine),
        "folder": model,
        "prompt": task.prompt,
        "options": task.options(),
        "input": inputs,
        "machine": {"memory": read_machine().physical, "threads": engine.options.threads},
        "plan": dict(engine.plan.purposes),
    }

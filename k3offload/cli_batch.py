"""The command ``batch``: parse, call, print."""

from __future__ import annotations

import itertools
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from .batch_file import refuse
from .batch_openai import NAME as OPENAI
from .batch_records import MANIFEST
from .cli_batch_run import RECORDS, Columns, Machines, Output, Run
from .cli_open import open_model, read_text, seeded
from .cli_options import Choice, How, Model, at_least_one, loading_options, takes_how
from .config import KDA_CHUNK
from .constrain import Grammar, constraint
from .documents import Document, count_documents, read_documents
from .errors import UsageError
from .find import find_model
from .progress import Progress, loading_libraries, write_out
from .session_manifest import refuse_in_model

if TYPE_CHECKING:
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
    prompt_file: Annotated[
        Path | None, typer.Option(help="The same as a UTF-8 file; - is stdin.")
    ] = None
    max_new_tokens: Annotated[
        int | None, typer.Option("-n", "--max-new-tokens", help="256 if unset.")
    ] = None
    context: Annotated[int, typer.Option(help="Most tokens of a prompt and its answer.")] = 4096
    sessions: Annotated[
        int, typer.Option(help="Documents at a time, at most; as many as let each read least.")
    ] = 64
    schema: Annotated[
        Path | None, typer.Option(help="JSON schema, a file; every answer follows it.")
    ] = None


class Among(NamedTuple):
    """Labels to choose among, by their likelihoods."""

    label: Annotated[
        list[str] | None,
        typer.Option(help="The likeliest is the answer, and nothing is generated; repeatable."),
    ] = None
    labels: Annotated[
        Path | None, typer.Option(help="The same as a UTF-8 file, one in each line.")
    ] = None
    label_end: Annotated[str, typer.Option(help="What ends each label, scored with it.")] = ""


@takes_how(
    "sweep", ask=Ask, among=Among, choice=Choice, columns=Columns, output=Output, machines=Machines
)
def batch(
    how: How,
    ask: Ask,
    among: Among,
    choice: Choice,
    columns: Columns,
    output: Output,
    machines: Machines,
    model: Model,
    inputs: Annotated[str, typer.Argument(help="Folder, pattern, text, JSONL, CSV or Parquet.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="A line of JSON for each document.")],
) -> None:
    """Answer every document of INPUTS; exit 3 if some of them failed."""
    at_least_one(("-n", ask.max_new_tokens), ("--context", ask.context))
    at_least_one(("--sessions", ask.sessions))
    machines.check(output, how)
    path = _path(out, model, output)
    with Progress() as progress:
        documents = read_documents(inputs, **columns._asdict(), but=path)
        first = list(itertools.islice(documents, 2))
        documents = itertools.chain(first, documents)
        with loading_libraries(progress):
            from .batch_meter import BatchMeter

            machines.load()
        task = _task(ask, among, choice, output, model, progress, path)
        total = count_documents(inputs, kind=columns.kind, but=path)
        meter = BatchMeter(progress, total, output.json_progress)

        def size(tokenizer: Tokenizer, spec: ModelSpec) -> dict[str, int | None]:
            head = _chat_head(first, tokenizer, find_model(model), ask.context)
            return _sizes(task, ask, total, head, tokenizer, spec)

        run = Run(model, inputs, documents, columns, task, path, output, progress, meter)
        if machines.ray is None:
            with open_model(model, size, how, progress, meter.layer) as engine:
                counts = run.here(engine)
        else:
            counts = run.on_ray(machines, loading_options(how), size)
        progress.clear()
        if output.as_json or output.json_progress:
            write_out(json.dumps({**meter.facts(), "records": counts}))
        else:
            progress.say(meter.line())
            progress.say(f"{counts['done']:,} records in {out}, {counts['failed']:,} of errors")
    if counts["failed"]:
        raise typer.Exit(SOME_FAILED)


def _task(
    ask: Ask, among: Among, choice: Choice, output: Output, model: str, progress: Progress,
    path: Path,
) -> Task:  # fmt: skip
    """What to do with every document.  Raises ``UsageError`` for what cannot be, and for options
    that would do nothing."""
    from .batch import NEW_TOKENS
    from .batch_prompt import around
    from .run_batch import Task

    prompt = _template(ask, progress)
    around(prompt)
    openai = model if output.output_format == OPENAI else ""
    labels = _labels(among, progress)
    if among.labels is not None and not labels:
        raise UsageError(f"{among.labels} holds no label.", "Write one in each line.")
    if labels:
        given = {**choice._asdict(), "n": ask.max_new_tokens, "schema": ask.schema}
        usual = {**Choice._field_defaults, "n": None, "schema": None}
        for name, value in given.items():
            if value not in (usual[name], []):
                option = f"--{name.replace('_', '-')}" if len(name) > 1 else f"-{name}"
                raise UsageError(f"{option} means nothing beside labels.", "Leave it out.")
        return Task(prompt, labels=labels, label_end=among.label_end, openai=openai)
    if among.label_end:
        raise UsageError("--label-end means nothing without labels.", "Give --label or --labels.")
    most = NEW_TOKENS if ask.max_new_tokens is None else ask.max_new_tokens
    if most >= ask.context:
        raise UsageError(f"-n {most} leaves no room in --context {ask.context}.", "Raise it.")
    grammar = None if ask.schema is None else Grammar.of_schema(read_text(ask.schema, progress))
    # also where it is greedy: a document may ask for a temperature of its own
    kept = _seed_of(path) if output.resume else None
    sampling = seeded(choice.sampling(grammar), progress, kept)
    return Task(prompt, most, sampling, openai=openai)


def _labels(among: Among, progress: Progress) -> tuple[str, ...]:
    """The labels that are typed, and those of the file."""
    lines = [] if among.labels is None else read_text(among.labels, progress).split("\n")
    return (*(among.label or ()), *(line for text in lines if (line := text.removesuffix("\r"))))


def _sizes(
    task: Task, ask: Ask, total: int | None, chat_head: int, tokenizer: Tokenizer, spec: ModelSpec
) -> dict[str, int | None]:
    """What is to be planned.  What the task names is refused now; and the memory that compiling a
    grammar takes is counted.  ``chat_head``: tokens that chats have in common."""
    from .batch_prompt import around
    from .choose_label import Labels

    most, answer, sessions, fewest = task.max_new_tokens or 0, task.max_new_tokens, ask.sessions, 1
    if task.labels:
        known = Labels(tokenizer, task.labels, task.label_end)
        most, answer = known.longest, 0  # what is computed of labels is computed as prompts are
        fewest += bool(known.copies)
        sessions = max(sessions, fewest)
        if most >= ask.context:
            raise UsageError(
                f"A label of {most} tokens leaves no room in --context {ask.context}.", "Raise it."
            )
    elif task.sampling is not None and task.sampling.grammar is not None:
        constraint(tokenizer, task.sampling.grammar)
    spec.check_context(len(tokenizer.encode(task.prompt)), most)
    head = len(tokenizer.encode(around(task.prompt)[0])) // KDA_CHUNK * KDA_CHUNK
    return {
        "context": ask.context,
        "sessions": sessions,
        "fewest": fewest,
        "answer": answer,
        "fewer": True,
        "prefix_head": 0 if total == 1 else max(head, chat_head),
    }


def _chat_head(first: list[Document], tokenizer: Tokenizer, folder: Path, context: int) -> int:
    """Tokens that the first two documents have in common, if they are chats; what grammars of
    their answers take of memory is taken now, so that it is counted."""
    from .batch_chat import Chats
    from .batch_prompt import shared

    chats = [document.chat for document in first if document.chat is not None]
    reads, made = Chats(tokenizer, folder), []
    for chat in chats:
        with suppress(UsageError):  # told when its turn comes
            made.append(reads.encode(chat))
            reads.guide(chat)
    return len(shared(made[0][:context], made[1])) if len(made) == 2 else 0


def _path(out: Path, model: str, output: Output) -> Path:
    """Where the records go, links resolved; refused before anything is loaded."""
    if not output.save_every >= 0:
        raise UsageError(f"--save-every is {output.save_every}.", "It must be 0 or more seconds.")
    if output.output_format not in (RECORDS, OPENAI):
        raise UsageError(
            f"--output-format is {output.output_format!r}.", f"Use {RECORDS} or {OPENAI}."
        )
    if output.resume and output.overwrite:
        raise UsageError("--resume and --overwrite exclude each other.", "Leave one out.")
    refuse_in_model(out, find_model(model))
    path = Path(os.path.realpath(out))
    refuse(path, output.resume or output.overwrite)
    return path


def _template(ask: Ask, progress: Progress) -> str:
    """The prompt with its place for a document."""
    if ask.prompt_file is None:
        return ask.prompt
    if ask.prompt != "{text}":
        raise UsageError("There are two prompts.", "Give --prompt or --prompt-file.")
    return read_text(ask.prompt_file, progress)


def _seed_of(out: Path) -> int | None:
    """The seed of the run that wrote ``out``, so that a seed that was drawn is not drawn anew."""
    try:
        seed = json.loads(out.with_name(out.name + MANIFEST).read_bytes())["options"]["seed"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return seed if isinstance(seed, int) else None

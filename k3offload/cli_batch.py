"""The command ``batch``: parse, call, print."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from . import __version__
from .batch_file import refuse
from .batch_records import MANIFEST, SAVE_EVERY, Records
from .cli_open import open_model, seeded
from .cli_options import AsJson, Choice, How, Model, at_least_one, loading_options, takes_how
from .constrain import Grammar, constraint
from .documents import SUFFIXES, Document, count_documents, read_documents
from .errors import UsageError
from .find import find_model
from .progress import Progress, loading_libraries, write_out
from .session_manifest import refuse_in_model

if TYPE_CHECKING:
    from .engine import Engine
    from .run_batch import BatchMeter, Task
    from .spec import ModelSpec
    from .tokenizer import Tokenizer

    Size = Callable[[Tokenizer, ModelSpec], dict[str, int | None]]

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


class Machines(NamedTuple):
    """Which machines compute."""

    ray: Annotated[
        str | None,
        typer.Option(help="Ray cluster that computes: auto, HOST:PORT, or local: made here."),
    ] = None
    ray_workers: Annotated[
        int | None, typer.Option(help="Engines there; one on each node if unset.")
    ] = None
    ray_block: Annotated[
        int | None, typer.Option(help="Documents that one is given at a time; 4 --sessions.")
    ] = None

    def load(self) -> None:
        """Import Ray if it is asked for.  Raises ``UsageError`` where it is missing."""
        os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # nothing starts it again once it is left
        try:
            if self.ray is not None:
                importlib.import_module(".run_ray", __package__)
        except ImportError as error:
            raise UsageError(
                f"--ray needs Ray Data, and it is not installed: {error}.",
                "Install it: pip install 'k3offload[ray]'.",
            ) from error

    def check(self, output: Output) -> None:
        """Raise ``UsageError`` for what would do nothing, or would not be done."""
        at_least_one(("--ray-workers", self.ray_workers), ("--ray-block", self.ray_block))
        if self.ray is None:
            for name, value in zip(self._fields[1:], self[1:], strict=True):
                if value is not None:
                    raise UsageError(f"--{name.replace('_', '-')} is about --ray.", "Name both.")
        elif "://" in self.ray:
            raise UsageError(
                f"--ray {self.ray}: answers are written where the cluster is joined.",
                "Start the command on one of its nodes, with --ray auto.",
            )
        elif output.save_every not in (0, SAVE_EVERY):
            raise UsageError("--save-every: workers save no answers under way.", "Leave it out.")


@takes_how("sweep", ask=Ask, choice=Choice, columns=Columns, output=Output, machines=Machines)
def batch(
    how: How,
    ask: Ask,
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
    machines.check(output)
    template, place = _template(ask), _place(out, model, output)
    if ask.max_new_tokens >= ask.context:
        raise UsageError(
            f"-n {ask.max_new_tokens} leaves no room in --context {ask.context}.", "Raise it."
        )
    with Progress() as progress:
        documents = read_documents(inputs, **columns._asdict(), but=place)
        with loading_libraries(progress):
            from .batch import around
            from .run_batch import BatchMeter, Task

            machines.load()
        around(template)
        grammar = None if ask.schema is None else Grammar.of_schema(_text(ask.schema))
        # also where it is greedy: a document may ask for a temperature of its own
        kept = _seed_of(place) if output.resume else None
        sampling = seeded(choice.sampling(grammar), progress, kept)
        task = Task(template, ask.max_new_tokens, sampling)
        total = count_documents(inputs, kind=columns.kind, but=place)
        meter = BatchMeter(progress, total, output.json_progress)

        def size(tokenizer: Tokenizer, spec: ModelSpec) -> dict[str, int | None]:
            spec.check_context(len(tokenizer.encode(template)), ask.max_new_tokens)
            if grammar is not None:  # refused now; and what it takes is counted in the plan
                constraint(tokenizer, grammar)
            answer = {"answer": ask.max_new_tokens, "fewer": True}
            return {"context": ask.context, "sessions": ask.sessions, **answer}

        run = _Run(model, inputs, documents, columns, task, place, output, progress, meter)
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


class _Run(NamedTuple):
    """A batch that is ready to be computed, here or elsewhere."""

    model: str
    inputs: str
    documents: Iterator[Document]
    columns: Columns
    task: Task
    place: Path
    output: Output
    progress: Progress
    meter: BatchMeter

    def here(self, engine: Engine) -> dict[str, int]:
        """With ``engine``; returns the counts of ``Records.finish``."""
        from .machine import read_machine
        from .run_batch import run_batch
        from .session_identity import identity

        self.progress.say(f"{engine.options.sessions} documents at a time")
        machine = {"memory": read_machine().physical, "threads": engine.options.threads}
        about = self._about(identity(engine), machine=machine, plan=dict(engine.plan.purposes))
        with self._records(about) as records:
            return run_batch(
                engine, self.documents, self.task, records, self.progress, self.meter,
                about["model"], self.output.save_every,
            )  # fmt: skip

    def on_ray(self, machines: Machines, loading: dict[str, Any], size: Size) -> dict[str, int]:
        """With workers on the nodes of a Ray cluster."""
        from .run_ray import cluster, run_ray, share, work_of
        from .run_ray_worker import Reading

        assert machines.ray is not None
        work = work_of(self.model, size, loading, self.task)
        how = {**self.columns._asdict(), "but": self.place}
        reading = Reading(self.inputs, how, os.getcwd())
        with cluster(machines.ray, self.progress):
            given = share(machines.ray_workers, loading)
            about = self._about(work.identity, machine={"ray": machines.ray}, workers=[])
            with self._records(about) as records:
                return run_ray(
                    work, given, machines.ray_block, reading, self.documents, records,
                    self.progress, self.meter,
                )  # fmt: skip

    def _records(self, about: dict[str, Any]) -> Records:
        output = self.output
        return Records.open(
            self.place, about, resume=output.resume, overwrite=output.overwrite,
            order="completed" if output.completed else "input",
            warn=lambda text: self.progress.say(f"warning: {text}"),
        )  # fmt: skip

    def _about(self, model: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """What the manifest says of the run."""
        return {
            "version": __version__,
            "model": model,
            "folder": self.model,
            "prompt": self.task.prompt,
            "options": self.task.options(),
            "input": self.inputs,
            **more,
        }


def _place(out: Path, model: str, output: Output) -> Path:
    """Where the records go, links resolved; refused before anything is loaded."""
    if not output.save_every >= 0:
        raise UsageError(f"--save-every is {output.save_every}.", "It must be 0 or more seconds.")
    if output.resume and output.overwrite:
        raise UsageError("--resume and --overwrite exclude each other.", "Leave one out.")
    refuse_in_model(out, find_model(model))
    place = Path(os.path.realpath(out))
    refuse(place, output.resume or output.overwrite)
    return place


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

"""How the command ``batch`` runs: with an engine here, or on the machines of a Ray cluster; the
output is the same.

Knows the options that decide this, and nothing of what is asked of a document.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from . import __version__
from .batch_records import SAVE_EVERY, Records
from .cli_options import AsJson, How, at_least_one
from .documents import SUFFIXES, Document
from .errors import UsageError
from .progress import Progress

if TYPE_CHECKING:
    from .batch_meter import BatchMeter
    from .engine import Engine
    from .run_batch import Task
    from .spec import ModelSpec
    from .tokenizer import Tokenizer

    Size = Callable[[Tokenizer, ModelSpec], dict[str, int | None]]

RECORDS = "records"  #: the output format that is usual


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
    output_format: Annotated[
        str, typer.Option(help="records; openai: lines of OpenAI's Batch API.")
    ] = RECORDS
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

    def check(self, output: Output, how: How) -> None:
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
        elif how.trace is not None or how.trace_with:
            raise UsageError("--trace: workers record nothing.", "Leave it out.")


class Run(NamedTuple):
    """A batch that is ready to be computed, here or elsewhere."""

    model: str
    inputs: str
    documents: Iterator[Document]
    columns: Columns
    task: Task
    path: Path
    output: Output
    progress: Progress
    meter: BatchMeter

    def here(self, engine: Engine) -> dict[str, int]:
        """With ``engine``; returns the counts of ``Records.finish``."""
        from .machine import read_machine
        from .run_batch import run_batch
        from .session_identity import identity

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
        how = {**self.columns._asdict(), "but": self.path}
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
            self.path, about, resume=output.resume, overwrite=output.overwrite,
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

"""``batch --ray``: the same documents, output and figures as ``run_batch``, computed by several
machines of a Ray cluster.

Ray Data does what a cluster needs: it reads blocks of documents as workers become free, keeps one
engine on each node (an actor), starts one that died again, and gives it its block once more.  This
file knows Ray and the output, which one process writes, and nothing of what happens in a worker
(``run_ray_worker.py``).

The input is read twice.  First here, in its order, for ids, digests and errors: only after that is
it known what a resumed run has to do.  Then by Ray, where this process runs, for the texts, a few
blocks ahead of the workers.  So neither process holds more than that, and a block that is lost with
a machine can be read again, which a stream that is read once could not.
"""

from __future__ import annotations

import io
import logging
import math
import os
import pickle
import re
import socket
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import ray
import ray.data
from ray.data.block import BlockMetadata

from .batch import LOST
from .batch_lines import digest
from .batch_meter import BatchMeter
from .batch_records import Records
from .batch_results import Result, Tally, bare
from .checkpoint import Checkpoint
from .documents import Document
from .errors import BatchError, CheckpointError, ReadError, UsageError
from .find import find_model
from .options import Options
from .precision import choose_precision
from .progress import Progress
from .registry import is_file
from .run_batch import Task, ask
from .run_ray_worker import BLOCK, ROW, Answers, Opened, Reading, Row, Work
from .session_identity import identity_of
from .spec import ModelSpec
from .tokenizer import Tokenizer

BLOCKS: Final = 4  #: a block is as many times the documents that run at a time
STORE: Final = 256 * 1024**2  #: bytes of Ray's object store where the cluster is started here
PATIENCE: Final = 10.0  #: seconds for a cluster to answer
RESUME: Final = "What was flushed is done: go on with --resume."


class Share(NamedTuple):
    """How many workers there are, and what each of them claims of its node."""

    workers: int
    cpus: int
    gpus: int


def work_of(
    model: str,
    size: Callable[[Tokenizer, ModelSpec], Mapping[str, int | None]],
    loading: Mapping[str, Any],
    task: Task,
) -> Work:
    """What workers are to do, checked here as far as it can be without loading weights.

    ``loading``: the options of ``open_engine``, ``size`` as there.  Raises what that raises, all
    but ``DoesNotFit``: how much memory there is, each node sees for itself.
    """
    if (device := loading["device"]) not in ("auto", "cpu", "cuda"):
        raise UsageError(
            f"--device {device!r} is not known with --ray.",
            "Use auto, cpu or cuda: which GPU a worker gets is Ray's choice.",
        )
    here = ("device", "threads")  # these are checked against each node's processors
    Options(**{k: v for k, v in loading.items() if v is not None and k not in here})
    folder = find_model(model)
    checkpoint = Checkpoint.open(folder)
    sizes = size(Tokenizer.load(folder, checkpoint.spec), checkpoint.spec)
    trunk = choose_precision(loading["trunk"], checkpoint.spec.trunk_precision)
    found = identity_of(checkpoint, loading["dtype"], loading["latent_dtype"], trunk)
    given = dict(loading)
    for name in ("scratch", "prefix_dir"):
        if given[name] is not None:
            given[name] = os.path.abspath(given[name])
    for name in ("policy", "predict"):
        if given[name] is not None and is_file(given[name]):
            given[name] = os.path.abspath(given[name])
    if folder == Path(model):
        model = str(folder.absolute())
    return Work(model, given, sizes, task, found)


class _Said(io.TextIOBase):
    """A stdout for Ray, which prints there what happens to its workers."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def write(self, text: str) -> int:
        """Say how ``text`` begins, without colours; behind that come pages of logs."""
        if line := re.sub(r"\x1b\[[0-9;]*m", "", text).strip():
            self._progress.say(line.splitlines()[0][:400])
        return len(text)


@contextmanager
def cluster(address: str, progress: Progress) -> Iterator[None]:
    """Ray, for as long as the block runs: ``local`` starts it here, all else is where one runs
    (``auto``, ``HOST:PORT``).  Raises ``UsageError`` if there is none."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # it would report to its makers
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    here = {"object_store_memory": STORE, "include_dashboard": False} if address == "local" else {}
    host, colon, port = address.rpartition(":")
    with redirect_stdout(_Said(progress)):
        try:
            if colon and port.isdigit():  # Ray itself tries for minutes
                socket.create_connection((host.strip("[]"), int(port)), PATIENCE).close()
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **here)
        except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            raise UsageError(
                f"--ray {address}: there is no Ray to connect to: {_first_line(error)}.",
                "Start it (ray start --head), name its HOST:PORT, or use --ray local.",
            ) from error
        else:
            yield
        finally:
            ray.shutdown()


def share(workers: int | None, loading: Mapping[str, Any]) -> Share:
    """What ``workers`` workers claim, or one for each node if it is None: all CPUs of the smallest
    node, so that Ray puts no second one beside it.

    Raises ``UsageError`` for a cluster that has not what ``loading`` asks for.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    nodes = [node for node in nodes if node.get("CPU", 0) >= 1]
    with_gpu = [node for node in nodes if node.get("GPU", 0) >= 1]
    if loading["device"] == "cuda":
        nodes = with_gpu
    if not nodes:
        what = "GPU" if loading["device"] == "cuda" else "CPU"
        raise UsageError(f"No node of the Ray cluster offers a {what}.", "Add one: ray start.")
    count = workers or len(nodes)
    on_one = math.ceil(count / len(nodes))
    if on_one > 1 and loading["ram"] is None:
        raise UsageError(
            f"{count} workers on {len(nodes)} nodes share memory, and none knows of the others.",
            "Give each a part of it with --ram.",
        )
    gpus = int(loading["device"] != "cpu" and len(with_gpu) == len(nodes))
    for kind in ("CPU", "GPU")[: 1 + gpus]:
        if (least := min(node[kind] for node in nodes)) < on_one:
            raise UsageError(
                f"{on_one} workers on a node are more than the {least:g} {kind}s it offers.",
                f"Give --ray-workers {int(least) * len(nodes)} or less.",
            )
    return Share(count, int(min(node["CPU"] for node in nodes)) // on_one, gpus)


def run_ray(
    work: Work,
    given: Share,
    block: int | None,
    reading: Reading,
    documents: Iterable[Document],
    records: Records,
    progress: Progress,
    meter: BatchMeter,
) -> dict[str, int]:
    """As ``run_batch``.  ``block``: documents that a worker is given at a time, None: as many as
    keep its sweeps full; ``reading``: the input, without what is decided here.

    Raises what a worker raised that ends the run, and ``BatchError`` where the input has changed
    meanwhile.
    """
    tally, decides = Tally(), digest(work.identity, work.task.prompt, work.task.options())
    meter.begins(tally, None)  # only an engine could say what is left
    wanted = _wanted(work.task, documents, decides, records, progress, meter, tally)
    if under_way := len(records.running()):
        progress.say(
            f"warning: {under_way:,} answers under way were saved here, and workers begin them "
            "anew; a run without --ray goes on with them"
        )
    records.flush()
    left = wanted.count(1)
    if left:
        given = given._replace(workers=min(given.workers, left))
        threads = work.loading["threads"] or given.cpus
        work = replace(work, loading={**work.loading, "threads": threads})
        fair = math.ceil(left / given.workers)
        most = block or min(BLOCKS * (work.sizes["sessions"] or 1), fair)
        reading = replace(reading, decides=decides, wanted=bytes(wanted), most=most)
        progress.say(f"{given.workers} workers, {most} documents a block")
        with closing(_rows(work, given, reading)) as rows:
            left -= _collect(rows, given.workers, records, progress, meter, tally)
    if left:
        raise BatchError(
            f"{left:,} documents of the input changed or went away while it was read.",
            "Leave it alone, and go on with --resume.",
        )
    return records.finish()


def _wanted(
    task: Task,
    documents: Iterable[Document],
    decides: str,
    records: Records,
    progress: Progress,
    meter: BatchMeter,
    tally: Tally,
) -> bytearray:
    """A byte for each document, 1 for those to compute.  Those that cannot be read are done."""
    wanted = bytearray()
    for document, known, done in ask(documents, decides, records, progress, meter):
        wanted.append(not done and document.error is None)
        if not done and document.error is not None:
            progress.say(f"{document.id}: {document.error}")
            result = Result(document.id, 0, "", (), "error", bare(document.error))
            records.add(task.line(result, known))
            tally.documents, tally.failed = tally.documents + 1, tally.failed + 1
    return wanted


def _collect(
    rows: Iterable[Row],
    workers: int,
    records: Records,
    progress: Progress,
    meter: BatchMeter,
    tally: Tally,
) -> int:
    """Write what comes back; how many records that were."""
    known: dict[str, Opened] = {}
    running: dict[str, int] = {}  # in the order in which workers were heard of
    lost = Counter[str]()  # documents in a row that could not be read there
    count = 0
    for row in rows:
        if row.fatal is not None:
            raise row.fatal
        assert row.record is not None and row.opened is not None
        who, line = row.opened.who, row.record
        if who not in known:
            _say_opened(row.opened, known, progress)
            records.note({"workers": [_of_manifest(opened) for opened in known.values()]})
        for text in row.warnings:
            progress.say(f"warning: {who}: {text}")
        if not records.awaits(line["id"], line["digest"]):
            continue  # of a document that is another one now
        records.add(line)
        records.flush()
        count += 1
        if row.error is not None:
            progress.say(f"{line['id']}: {row.error}")
        running.pop(who, None)
        running[who] = row.tally.running
        if len(running) > workers:  # one of them died
            del running[next(iter(running))]
        _add(tally, row.tally, sum(running.values()))
        meter.swept(tally)
        lost[who] = lost[who] + 1 if isinstance(row.error, (ReadError, CheckpointError)) else 0
        if row.error is not None and lost[who] > max(LOST, 2 * row.opened.sessions):
            raise type(row.error)(f"{who}: {row.error.problem}", row.error.remedy)
    return count


def _add(tally: Tally, of: Tally, running: int) -> None:
    """Count what a row says; the last sweep is that of one worker."""
    tally.documents += of.documents
    tally.failed += of.failed
    tally.running = running
    tally.prompt_tokens += of.prompt_tokens
    tally.new_tokens += of.new_tokens
    tally.sweeps += of.sweeps
    tally.read += of.read
    tally.copied += of.copied
    tally.rows, tally.seconds = of.rows, of.seconds
    tally.experts, tally.bytes = of.experts, of.bytes


def _say_opened(opened: Opened, known: dict[str, Opened], progress: Progress) -> None:
    """Tell of a worker, and of what it computes otherwise than the first."""
    first = next(iter(known.values()), opened)
    known[opened.who] = opened
    if opened is first:
        progress.say(opened.plan)
    progress.say(
        f"worker: {opened.who}, {opened.threads} threads, {opened.sessions} documents at a time"
    )
    if differ := [name for name, value in opened.by.items() if value != first.by[name]]:
        progress.say(
            f"warning: {opened.who} computes with another {' and another '.join(differ)} than "
            f"{first.who}, and rounds otherwise; --isa and --device make them the same"
        )


def _of_manifest(opened: Opened) -> dict[str, Any]:
    return {"who": opened.who, "sessions": opened.sessions, "threads": opened.threads}


def _rows(work: Work, given: Share, reading: Reading) -> Generator[Row, None, None]:
    """What the workers send, as it comes.  Closed, it ends them: later Ray may be gone."""
    context = ray.data.DataContext.get_current()
    context.target_max_block_size = 1  # each block of documents and each row travels alone
    context.execution_no_progress_timeout_s = -1  # a sweep takes as long as it takes
    context.enable_progress_bars = context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    workers = ray.data.ActorPoolStrategy(size=given.workers, max_tasks_in_flight_per_actor=1)
    read = ray.data.read_datasource(_Documents(reading), override_num_blocks=1, num_cpus=0)
    answers = read.map_batches(
        Answers, fn_constructor_args=(work,), batch_size=1, compute=workers,
        num_cpus=given.cpus, num_gpus=given.gpus,
    )  # fmt: skip
    try:
        with closing(iter(answers.iter_batches(batch_size=None, prefetch_batches=0))) as batches:
            for batch in batches:
                for row in batch[ROW]:
                    yield pickle.loads(row)
    except (ray.exceptions.RayError, ray.data.exceptions.UserCodeException) as error:
        raise BatchError(f"Ray ended the run: {_first_line(error)}.", RESUME) from error


class _Documents(ray.data.Datasource):
    """The input as one task of Ray that yields blocks; it runs where this process does."""

    def __init__(self, reading: Reading) -> None:
        super().__init__()
        self._reading = reading

    def estimate_inmemory_data_size(self) -> None:
        """Nobody knows."""

    def get_read_tasks(self, parallelism: int, **_: Any) -> list[ray.data.ReadTask]:
        """One, whatever the parallelism."""
        read = self._reading.blocks
        unknown = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [ray.data.ReadTask(lambda: (_table(block) for block in read()), unknown)]

    @property
    def supports_distributed_reads(self) -> bool:
        """The files are those of this machine."""
        return False


def _table(block: bytes) -> Any:
    import pyarrow

    return pyarrow.table({BLOCK: pyarrow.array([block], pyarrow.large_binary())})


def _first_line(error: BaseException) -> str:
    """What is at the bottom of ``error``, in one line without its end."""
    while isinstance(deeper := getattr(error, "cause", None) or error.__cause__, BaseException):
        error = deeper
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(".: ")

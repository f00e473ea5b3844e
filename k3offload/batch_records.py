"""The durable output of a batch: one JSON object a line, appended as documents are done.

    OUT.jsonl             the records; a document is done when its line is on the drive
    OUT.jsonl.run.json    what was run, when, how far it is: replaced in one step
    OUT.jsonl.state/      the lock, and what is kept of documents under way; gone at the end
    OUT.jsonl.part        only while OUT is replaced

A run that was killed at any moment goes on with ``resume``.  Half of a line at the end is cut off.
A record whose document has another digest now, or that asks to be tried again, is stale: the new
one is appended, and until then the old one stays.  ``finish`` leaves one record for each document
of the input, by writing the file once more beside itself unless it is so already.  In the order of
the input the file then has the bytes it would have had without an interruption.

With ``overwrite`` the old file stays, whole, until the first ``flush`` with a record replaces it.
This file knows files and JSON and nothing of engines.
"""

from __future__ import annotations

import json
import os
import time
from array import array
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal

from .batch_file import OutFile, beside, naming, refuse
from .batch_index import ASKED, FAILED, HAVE, RETRY, Index, key_of
from .batch_lines import Line, encode, record_line
from .batch_states import State, States
from .durable import LockFile, sync, write_file
from .errors import BatchError, UsageError
from .paths import show_path

MANIFEST, STATES, LOCK = ".run.json", ".state", "lock"  #: behind OUT's name; a file in STATES
FORMAT: Final = 1
SAVE_EVERY: Final = 600.0  #: seconds between two saves of what is under way, by default
EVERY: float = 5.0  #: seconds between two manifests while records are added
DECIDES: Final = ("model", "prompt", "options")  #: parts of the manifest that all digests cover

Order = Literal["input", "completed"]


class Records:
    """The output of one run; made by ``open``, used in a ``with``.

    For each document of the input, in its order, ask ``done``.  Those that are not done are
    computed and given to ``add``, in any order; ``flush`` brings them to the drive.  After the last
    one ``finish``.  Every method raises ``BatchError`` naming the file that cannot be written; what
    was flushed before is then still done, and ``flush`` may be tried again.
    """

    def __init__(
        self, out: Path, about: Mapping[str, Any], order: Order, warn: Callable[[str], None]
    ) -> None:
        self.out, self._order, self._warn = out, order, warn
        self._about = dict(about)
        self._index, self._asked = Index(), array("i")
        self._pending: list[tuple[int, bytes, bool, bool]] = []
        self._waiting: set[int] = set()
        self._lock: LockFile
        self._states: States
        self._file: OutFile
        self._last, self._closed = -1, False
        self._stale = self._reused = self._dropped = 0
        self._began, self._resumes, self._before = time.time(), 0, 0.0
        self._started = time.monotonic()
        self._noted, self._finished = float("-inf"), False

    @classmethod
    def open(
        cls,
        out: str | os.PathLike[str],
        about: Mapping[str, Any],
        *,
        resume: bool = False,
        overwrite: bool = False,
        order: Order = "input",
        warn: Callable[[str], None] = lambda text: None,
    ) -> Records:
        """Begin the file ``out``, or go on with it (``resume``), or replace it (``overwrite``).

        ``about`` is what the manifest says of the run: version, model, prompt, options, input,
        machine.  A warning says which of ``DECIDES`` the earlier run had otherwise.  Raises
        ``UsageError`` if ``out`` is there and neither is said, is no regular file, or is being
        written by another run; ``BatchError`` naming the file, and the line if it is damaged.
        """
        if resume and overwrite:
            raise UsageError("--resume and --overwrite exclude each other.", "Leave one out.")
        made = cls(Path(os.path.realpath(out)), about, order, warn)  # a rename replaces no link
        path, folder = made.out, beside(made.out, STATES)
        encode(made._content(False))  # fails now and not after hours
        refuse(path, resume or overwrite)
        if os.path.islink(folder) or (os.path.exists(folder) and not os.path.isdir(folder)):
            raise UsageError(f"{show_path(folder)} is no folder.", "Move it, or name another OUT.")
        with naming(path):
            made._lock = LockFile(folder / LOCK)
        if made._lock.who:
            raise UsageError(
                f"Another run is writing {show_path(path)}: {made._lock.who}.",
                "Wait for it, end it, or name another OUT.",
            )
        try:
            refuse(path, resume or overwrite)  # it may have been made meanwhile
            made._states = States(folder)
            with naming(path):
                made._file = OutFile(path, overwrite)
                made._begin(resume)
        except BaseException:
            made._release(undo=True)
            raise
        return made

    def __enter__(self) -> Records:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(failed=error is not None)

    def close(self, failed: bool = False) -> None:
        """Bring what was added to the drive and let the file go; closing twice is fine.

        ``failed``: an error is on its way already, and one from here would hide it.
        """
        if self._closed:
            return
        try:
            if not self._finished:
                self.flush(force=True)
        except BatchError:
            if not failed:
                raise
        finally:
            self._release()

    def _release(self, undo: bool = False) -> None:
        self._closed = True
        if hasattr(self, "_file"):
            self._file.close(undo)
        self._lock.release()

    # The beginning

    def _begin(self, resume: bool) -> None:
        if not self._lock.works:
            self._warn(
                f"{show_path(self.out)} is on a file system without locks: take care that no "
                "other run writes it"
            )
        if not resume:
            self._states.clear()
        else:
            if self._file.there:
                if self._file.read(self._take, self._warn):
                    self._index.length[self._last] += 1  # it has its newline now
                self._read_manifest()
            self._states.load(self._warn)
            for state in self._states.running():
                row = self._index.find(key := key_of(state.id))
                same = row >= 0 and self._index.digest(row) == key_of(state.digest)
                if same and not self._index.flags[row] & RETRY:
                    self._states.drop(key)  # killed between its record and this
        if not self._file.hidden:
            sync(self.out.parent)
            self._note()

    def _take(self, line: Line) -> None:
        """A record that is there; the newest of a document counts."""
        row = self._last = self._index.put(key_of(line.id))
        self._stale += self._index.flags[row] & HAVE
        self._index.flags[row] = HAVE | RETRY * line.retry | FAILED * line.failed
        self._index.set_digest(row, key_of(line.digest))
        self._index.begin[row], self._index.length[row] = line.begin, line.length

    def _read_manifest(self) -> None:
        """Take up the times of the earlier run, and say if it was of something else."""
        path = beside(self.out, MANIFEST)
        self._resumes = 1
        try:
            content = json.loads(path.read_bytes())
            self._began = datetime.fromisoformat(content["began"]).timestamp()
            self._resumes, self._before = int(content["resumes"]) + 1, float(content["seconds"])
        except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
            self._warn(f"{show_path(path)} is missing or damaged, and begun anew")
            return
        now = json.loads(encode(self._about))
        other = [name for name in DECIDES if content.get(name) != now.get(name)]
        if other and len(self._index):
            self._warn(
                f"{show_path(self.out)} was begun with another {' and another '.join(other)}: "
                "what was recorded with it is computed anew"
            )

    # Documents

    def done(self, id: str, digest: str) -> bool:
        """Whether the next document of the input has its record; if not, it is to be computed.

        The order of these calls is the order of the input.  Drops what was kept of the document
        with another digest.  Raises ``UsageError`` if the input has the id a second time.
        """
        assert not self._finished
        key, wanted = key_of(id), key_of(digest)
        index, row = self._index, self._index.put(key)
        flags = index.flags[row]
        if flags & ASKED:
            raise UsageError(
                f"The id {id[:200]!a} stands twice in the input.", "Give each document its own."
            )
        self._asked.append(row)
        good = bool(flags & HAVE) and not flags & RETRY and index.digest(row) == wanted
        if good:
            self._reused += 1
        else:
            self._stale += flags & HAVE
            flags = 0
            index.set_digest(row, wanted)
        index.flags[row] = flags | ASKED
        kept = self._states.get(key)
        if kept is not None and (good or kept.digest != digest):
            self._states.drop(key)
        return good

    def awaits(self, id: str, digest: str) -> bool:
        """Whether ``add`` may be given a record of this document: asked for, and without one."""
        row = self._index.find(key_of(id))
        if row < 0 or row in self._waiting or self._index.flags[row] != ASKED:
            return False
        return self._index.digest(row) == key_of(digest)

    def add(self, record: Mapping[str, Any]) -> None:
        """The record of a document that was not done: ``id``, ``digest`` and whatever else.

        It counts as failed with an ``error``, and a later run tries it again with ``retry`` true.
        One that JSON cannot hold (NaN) is replaced by an error, with a warning.  It is on the
        drive, and the document done, after ``flush``.
        """
        assert not self._finished
        assert self.awaits(record["id"], record["digest"]), record["id"]
        row = self._index.find(key_of(record["id"]))
        line, wrong = record_line(record)
        if wrong:
            self._warn(f"document {record['id'][:200]!a}: {wrong}")
        failed = bool(wrong) or record.get("error") is not None
        retry = not wrong and record.get("retry") is True
        self._pending.append((row, line, failed, retry))
        self._waiting.add(row)

    def flush(self, force: bool = False) -> None:
        """Bring the records that were added to the drive, and drop what was kept of their
        documents; once a sweep.  The manifest follows every few seconds, or if ``force``."""
        if self._pending:
            begin = self._file.size
            with naming(self.out):
                self._file.append(b"".join(line for _, line, _, _ in self._pending))
            for row, line, failed, retry in self._pending:
                self._index.flags[row] |= HAVE | RETRY * retry | FAILED * failed
                self._index.begin[row], self._index.length[row] = begin, len(line)
                begin += len(line)
            rows = [row for row, _, _, _ in self._pending]
            self._pending, self._waiting = [], set()
            for row in rows:
                self._states.drop(self._index.key(row))
        if not self._file.hidden and (force or time.monotonic() - self._noted >= EVERY):
            self._note()

    # Documents under way

    def state_folder(self, id: str) -> Path:
        """Where the state of document ``id`` may be saved, before ``keep_state``; a path below
        ``OUT.state`` that the caller makes."""
        return self._states.folder(id)

    def keep_state(self, id: str, digest: str, extra: Mapping[str, Any]) -> None:
        """Let a later run know how far document ``id`` is.

        A kill between the folder and this leaves the folder newer than its note: ``extra`` should
        say which save it means.
        """
        with naming(self.state_folder(id)):
            self._states.keep(id, digest, extra)

    def state(self, id: str) -> State | None:
        """What is kept of document ``id``; after ``done``, which drops one of another digest."""
        return self._states.get(key_of(id))

    def running(self) -> list[State]:
        """What is kept of all documents, by id."""
        return self._states.running()

    def drop_state(self, id: str) -> None:
        """Forget how far document ``id`` is; ``flush`` does it for those that are done."""
        self._states.drop(key_of(id))

    # The end

    def finish(self) -> dict[str, int]:
        """Leave one record for each document of the input, in the order asked for, and say in the
        manifest that all is done.  Returns the counts of the manifest.

        Needs room for a second copy of the file, unless it is as it should be already.  Raises
        ``BatchError`` if there is none: all records stay, and a resumed run need only finish.
        """
        self.flush()
        index = self._index
        missing = [row for row in self._asked if not index.flags[row] & HAVE]
        assert not missing, f"{len(missing)} documents have no record"
        self._dropped = index.count(HAVE) - len(self._asked)
        if self._dropped:
            self._warn(
                f"{self._dropped:,} records of documents that the input has no more are dropped "
                f"from {show_path(self.out)}"
            )
        rows = self._asked
        if self._order == "completed":
            rows = array("i", sorted(rows, key=index.begin.__getitem__))
        self._finished = True  # what would be added now might not reach the new file
        with naming(self.out):
            self._file.publish()  # there was nothing to add
            if not self._lies_so(rows):
                self._file.rewrite((index.begin[row], index.length[row]) for row in rows)
        self._note(finished=True)
        self._states.clear()
        return self.counts()

    def _lies_so(self, rows: Iterable[int]) -> bool:
        at = 0
        for row in rows:
            if self._index.begin[row] != at:
                return False
            at += self._index.length[row]
        return at == self._file.size

    # The manifest

    def note(self, facts: Mapping[str, Any]) -> None:
        """Add to what the manifest says of the run, from the next one on."""
        encode(facts)  # fails here and not at the end
        self._about |= facts

    def counts(self) -> dict[str, int]:
        """Documents of the input so far and those that are done, failed, to be tried again, found
        done at the beginning; stale and dropped records."""
        index = self._index
        return {
            "documents": len(self._asked),
            "done": index.count(HAVE | ASKED),
            "failed": index.count(HAVE | ASKED | FAILED),
            "retry": index.count(HAVE | ASKED | RETRY),
            "reused": self._reused,
            "stale": self._stale,
            "dropped": self._dropped,
        }

    def _note(self, finished: bool = False) -> None:
        path = beside(self.out, MANIFEST)
        with naming(path):
            write_file(path, [encode(self._content(finished), indent=2)])
            sync(path.parent)
        self._noted = time.monotonic()

    def _content(self, finished: bool) -> dict[str, Any]:
        now = time.time()
        ours = {
            "format": FORMAT,
            "finished": finished,
            "began": _moment(self._began),
            "updated": _moment(now),
            "ended": _moment(now) if finished else None,
            "seconds": round(self._before + time.monotonic() - self._started, 3),
            "resumes": self._resumes,
            "order": self._order,
            "counts": self.counts(),
        }
        assert not ours.keys() & self._about.keys(), ours.keys() & self._about.keys()
        return {**self._about, **ours}


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")

"""How fast this machine reads a model by our own pattern, beside fio where that is installed.

Pages are drawn at random and read through the disk tier into slots, as misses are; a model
without routed experts is read in parts of its trunk.  fio reads the same files with the same
block size, at random aligned places, with as many requests at once and into memory of the same
kind: huge pages, without which it is a third slower.  The two take turns, because a drive's speed
drifts, and the median of the ratios counts.  Nothing is written anywhere.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .checkpoint import Checkpoint
from .config import show_size
from .errors import CheckpointError, K3Error
from .tiers.base import Location, PageId
from .tiers.tier_disk import IN_FLIGHT, READERS, DiskTier, windows
from .tiers.tier_ram import HUGE, Slab

ENOUGH: Final = 0.95  #: of fio's rate
SMALL: Final = 100_000_000  #: bytes; a drive may keep that much in its own memory
PART: Final = 16 << 20  #: bytes of a page of a model without experts
MOST_BYTES: Final = 100_000_000_000  #: read in one measurement, whatever the time
ENGINES: Final = {  # fio's names: blocking reads in threads, or queued by the kernel
    "psync": {"numjobs": READERS, "iodepth": 1},
    "libaio": {"numjobs": 1, "iodepth": READERS},
}

HUGE_PAGES: Final = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  #: for fio's buffers
MEANINGS: Final = {
    "rate": "bytes/s, ours",
    **{f"fio_{name}": f"bytes/s, fio with {name}" for name in ENGINES},
    **{f"of_fio_{name}": "ours by that" for name in ENGINES},
    "processors": "processors that ours kept busy",
}


@dataclass(frozen=True)
class ReadRate:
    """What reads of the model's own files reach."""

    rate: float  #: bytes of pages a second
    what: str  #: what a page is
    page_bytes: int  #: of the largest page
    window_bytes: int  #: of the aligned reads that bring it
    pages: int  #: that were drawn from
    drawn_bytes: int  #: bytes of those
    reads: int  #: pages read, some several times
    bytes: int
    seconds: float
    processors: float  #: processor time of this process / time
    mode: str  #: direct, buffered, or both
    notes: tuple[str, ...]  #: what to know about the figure


def read_rate(
    checkpoint: Checkpoint, seconds: float = 2.0, seed: int = 0, most_bytes: int = MOST_BYTES
) -> ReadRate:
    """Read random pages of ``checkpoint`` for ``seconds``, at most ``most_bytes``.

    Takes memory for the pages under way, about ``IN_FLIGHT`` bytes and four pages.  Raises
    ``ReadError``, or ``CheckpointError`` if the model has nothing to read.
    """
    with closing(_Pattern(checkpoint, seed)) as pattern:
        pattern.run(seconds, most_bytes)
        return pattern.result()


class Turns:
    """Our reads and fio's in turns; ours alone where fio cannot be used, and ``why_not``."""

    def __init__(self, checkpoint: Checkpoint, seed: int = 0) -> None:
        self._program = shutil.which("fio")
        self._pattern = _Pattern(checkpoint, seed)
        try:
            # one read: which mode, and the files are open
            self._pattern.run(0, self._pattern.page_bytes)
        except BaseException:
            self._pattern.close()
            raise
        missing = "fio is not installed" if self._program is None else ""
        self.why_not = missing or self._pattern.not_comparable()
        self._number = 0

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, *error: object) -> None:
        self._pattern.close()

    @property
    def ours(self) -> ReadRate:
        """All of our reads so far."""
        return self._pattern.result()

    def turn(self, seconds: float, seed: int) -> dict[str, Any]:
        """Figures of a turn of each, ``seconds`` in all: rates in bytes a second, and ours by
        those of fio's engines."""
        names = [""] if self.why_not else ["", *ENGINES]
        each = seconds if self.why_not else max(0.2, seconds / len(names))
        at = self._number % len(names)  # a drift in one direction favours nobody
        self._number += 1
        before, rates = self.ours, {}
        for name in names[at:] + names[:at]:
            if name:
                assert self._program is not None
                rates[name] = _fio(self._program, self._pattern, name, each, seed)
            else:
                rates[name] = self._pattern.run(each, MOST_BYTES // 10)
        after, ours = self.ours, rates.pop("")
        busy = after.processors * after.seconds - before.processors * before.seconds
        return {
            "rate": ours, "processors": busy / (after.seconds - before.seconds),
            "reads": after.reads - before.reads, "bytes": after.bytes - before.bytes,
            "mode": after.mode, **{f"fio_{name}": rate for name, rate in rates.items()},
            **{f"of_fio_{name}": ours / rate for name, rate in rates.items()},
        }  # fmt: skip


def faster_engine(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """The engine of fio that was the faster by its median; None where fio was not run."""
    if not lines or f"fio_{next(iter(ENGINES))}" not in lines[0]:
        return None
    return max(ENGINES, key=lambda name: statistics.median(line[f"fio_{name}"] for line in lines))


class _Pattern:
    """Reads of random pages, as many under way as the disk tier takes at once."""

    def __init__(self, checkpoint: Checkpoint, seed: int) -> None:
        self.what, self._pages = _pages_of(checkpoint)
        if not self._pages:
            raise CheckpointError("The model has no bytes to read.", "Name another model.")
        self._random = random.Random(seed)
        self.drawn_bytes = sum(e.length for page in self._pages for e in page)
        self.page_bytes = max(sum(e.length for e in page) for page in self._pages)
        self.window_bytes = max(windows(page)[1] for page in self._pages)
        self._slab = Slab((IN_FLIGHT // self.window_bytes + 4) * self.window_bytes)
        self._free = self._slab.slots(self.window_bytes)
        self._files = checkpoint.files
        self._disk = DiskTier(checkpoint.files, lambda page: self._pages[page.expert])
        self._reads, self._bytes, self._seconds, self._processor = 0, 0, 0.0, 0.0

    def close(self) -> None:
        self._disk.close()

    @property
    def files(self) -> list[Path]:
        """Those that the pages lie in."""
        return [self._files[i] for i in sorted({e.file for page in self._pages for e in page})]

    def run(self, seconds: float, most_bytes: int) -> float:
        """Read for ``seconds`` or ``most_bytes``, one page at least; bytes of pages a second."""
        begin, processor, read = time.perf_counter(), time.process_time(), 0
        under_way: deque[Any] = deque()
        while True:
            go_on = read < most_bytes and (not read or time.perf_counter() - begin < seconds)
            if go_on and self._free:
                page = PageId(0, self._random.randrange(len(self._pages)))
                slot = self._free.pop()
                under_way.append((self._disk.read(page, slot), slot))
                read += self._disk.size(page)
                self._reads += 1
            elif under_way:
                ticket, slot = under_way.popleft()
                ticket.wait()
                self._free.append(slot)
            else:
                break
        took = time.perf_counter() - begin
        self._bytes, self._seconds = self._bytes + read, self._seconds + took
        self._processor += time.process_time() - processor
        return read / took

    def not_comparable(self) -> str:
        """Why fio's figure would say nothing; empty if it would."""
        if self.mode != "direct":
            return "the file system refuses direct reads"
        if self.drawn_bytes < SMALL:
            return "so little of a model is read from the drive's own memory"
        if min(file.stat().st_size for file in self.files) < self.window_bytes:
            return "a file is smaller than a page's window"
        return ""

    @property
    def mode(self) -> str:
        return " and ".join(sorted(set(self._disk.counts.modes.values())))

    def result(self) -> ReadRate:
        notes = []
        if self.drawn_bytes < SMALL:
            notes.append(
                f"The pages are {show_size(self.drawn_bytes)} in all, which a drive may hold in "
                "its own memory, and small: this is no figure for a large model."
            )
        if self.mode != "direct":
            notes.append("Buffered reads may come from the page cache and not from the drive.")
        return ReadRate(
            rate=self._bytes / self._seconds,
            what=self.what,
            page_bytes=self.page_bytes,
            window_bytes=self.window_bytes,
            pages=len(self._pages),
            drawn_bytes=self.drawn_bytes,
            reads=self._reads,
            bytes=self._bytes,
            seconds=self._seconds,
            processors=self._processor / self._seconds,
            mode=self.mode,
            notes=tuple(notes),
        )


def _pages_of(checkpoint: Checkpoint) -> tuple[str, list[tuple[Location, ...]]]:
    """What is read at random: every routed expert, or the trunk in parts."""
    spec = checkpoint.spec
    if spec.moe is not None and spec.moe_layers:
        every = [(layer, e) for layer in spec.moe_layers for e in range(spec.moe.experts)]
        return "routed experts", [checkpoint.expert(*page).extents for page in every]
    tensors = [*checkpoint.globals().values()]
    tensors += [t for layer in spec.layers for t in checkpoint.trunk(layer.index)]
    parts: list[tuple[Location, ...]] = [
        (Location(file, offset + at, min(PART, length - at)),)
        for file, offset, length in (tensor.location for tensor in tensors)
        for at in range(0, length, PART)
    ]
    return "parts of the trunk (the model has no routed experts)", parts


def _fio(program: str, pattern: _Pattern, engine: str, seconds: float, seed: int) -> float:
    """Bytes a second that fio reads with one of its engines."""
    names = ":".join(str(file).replace(":", "\\:") for file in pattern.files)
    options = {
        "name": "k3offload", "filename": names, "rw": "randread", "direct": 1,
        "bs": pattern.window_bytes, "ioengine": engine, **ENGINES[engine],
        "runtime": f"{round(seconds * 1000)}ms", "time_based": 1, "norandommap": 1,
        "randseed": seed + 1, "file_service_type": "random", "group_reporting": 1, "thread": 1,
        "allow_file_create": 0, "output-format": "json", "iomem_align": HUGE,
    }  # fmt: skip
    command = [program, "--readonly", *(f"--{key}={value}" for key, value in options.items())]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds + 60, env=os.environ | HUGE_PAGES
    )
    try:
        found = json.loads(done.stdout[done.stdout.index("{") :])
        return float(found["jobs"][0]["read"]["bw_bytes"])
    except (ValueError, KeyError, IndexError) as error:
        said = (done.stderr or done.stdout).strip()[-300:]
        raise K3Error(f"fio did not run: {said}", "Mend fio, or take it off the PATH.") from error

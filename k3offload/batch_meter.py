"""What a batch has done and how long the rest takes: a line for people, lines of JSON for machines.

Knows figures, a clock and the two streams; where the figures come from is the batch's.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from .batch_results import Tally
from .config import show_size
from .progress import Progress, show_seconds, write_out

EVERY: float = 1.0  #: seconds between two lines for machines, and between two looks at what is left
LAST = 16  #: sweeps that the disk's rate is taken over

Left = Callable[[int], float | None]  #: documents still to be taken -> seconds until all are done


class BatchMeter:
    """What is going on, for people in one line, for machines as lines of JSON on stdout."""

    def __init__(
        self,
        progress: Progress,
        total: int | None,
        as_json: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress, self._total, self._json, self._clock = progress, total, as_json, clock
        self._tally, self._where = Tally(), ""
        self._skipped = 0
        self._saved: int | None = None
        self._begin, self._out = clock(), sys.stdout
        self._said = float("-inf")
        self._left: Left | None = None
        self._looked: tuple[float, float] | None = None  # when, and the seconds left by then
        self._last = deque[tuple[float, int]](maxlen=LAST)  # seconds and bytes of sweeps

    def begins(self, tally: Tally, left: Left | None) -> None:
        """The model is loaded; ``tally`` goes on changing, and ``left`` is asked between sweeps,
        if there is somebody to ask."""
        self._tally, self._left, self._begin = tally, left, self._clock()

    def skipped(self) -> None:
        """A document of the input has its record already."""
        self._skipped += 1

    def saved(self) -> None:
        """What is under way is saved."""
        self._saved = self._tally.sweeps

    def layer(self, layer: int, layers: int) -> None:
        """Layer ``layer`` (from 0) of ``layers`` begins."""
        self._where = f"layer {layer + 1} of {layers}"
        self._show(layer, layers)

    def swept(self, tally: Tally) -> None:
        """A sweep has ended."""
        self._tally, self._where = tally, ""
        self._last.append((tally.seconds, tally.bytes))
        if self._total is not None and self._left is not None:
            now = self._clock()
            if self._looked is None or now - self._looked[0] >= EVERY:
                waiting = self._total - self._skipped - tally.documents - tally.running
                left = self._left(max(0, waiting))
                self._looked = None if left is None else (now, left)
        self._show(0, 1)

    def left(self) -> float | None:
        """Seconds until all are done, from what was measured; None if nobody knows."""
        if self._tally.documents + self._skipped == self._total:
            return 0.0
        if self._looked is None:
            return None
        when, left = self._looked
        return max(0.0, left - (self._clock() - when))

    def disk_rate(self) -> float | None:
        """Bytes a second that came from disk in the last sweeps."""
        seconds = sum(seconds for seconds, _ in self._last)
        return sum(size for _, size in self._last) / seconds if seconds else None

    def facts(self) -> dict[str, Any]:
        """The figures so far."""
        tally, seconds = self._tally, self._clock() - self._begin
        return {
            "documents": tally.documents + self._skipped,
            "of": self._total,
            "found_done": self._skipped,
            "failed": tally.failed,
            "running": tally.running,
            "prompt_tokens": tally.prompt_tokens,
            "new_tokens": tally.new_tokens,
            "tokens_per_second": tally.new_tokens / seconds if seconds else None,
            "sweep": tally.sweeps,
            "saved_at_sweep": self._saved,
            "rows": tally.rows,
            "experts_a_layer": tally.experts,
            "bytes_per_token": tally.bytes / tally.rows if tally.rows else None,
            "bytes_read": sum(tally.read.values()),
            "read": dict(tally.read),
            "copied": dict(tally.copied),
            "disk_rate": self.disk_rate(),
            "seconds": seconds,
            "seconds_left": self.left(),
        }

    def _show(self, layer: int, layers: int) -> None:
        if not self._json:
            self._progress.show(self.line())
            return
        now = self._clock()
        if now - self._said >= EVERY:
            self._said = now
            write_out(json.dumps({**self.facts(), "layer": layer, "layers": layers}), to=self._out)

    def line(self) -> str:
        """The figures so far in words."""
        f = self.facts()
        of = "" if self._total is None else f" of {self._total:,}"
        parts = [f"{f['documents']:,}{of} documents"]
        if f["failed"]:
            parts.append(f"{f['failed']:,} failed")
        parts.append(f"{f['running']:,} running")
        if f["new_tokens"]:
            parts.append(f"{f['new_tokens']:,} tokens, {f['tokens_per_second']:.3g} a second")
        if f["rows"]:
            read = f"{show_size(int(f['bytes_per_token']))} a token"
            parts.append(f"{f['rows']:,} rows a sweep, {f['experts_a_layer']:.3g} experts, {read}")
        if f["read"]:
            parts.append(f"read {_sizes(f['read'])}")
        if f["disk_rate"]:
            parts[-1] += f" ({show_size(int(f['disk_rate']))}/s)"
        if f["copied"]:
            parts.append(f"to the device {_sizes(f['copied'])}")
        if f["seconds_left"] is not None:
            parts.append(f"{show_seconds(f['seconds_left'])} left")
        parts.append(f"sweep {f['sweep'] + 1:,} {self._where}".rstrip())
        return ", ".join(parts)


def _sizes(sizes: Mapping[str, int]) -> str:
    """``1.2 GB experts and 300 MB trunk``, the largest first."""
    order = sorted(sizes, key=lambda kind: -sizes[kind])
    return " and ".join(f"{show_size(sizes[kind])} {kind}" for kind in order)

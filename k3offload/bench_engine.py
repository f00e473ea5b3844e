"""What benchmarks of a whole engine share: texts, cache sizes, and accounts that are checked.

``Accounts`` says what an engine was asked for and read between two moments, and raises where its
identities do not hold or the kernel's own account of bytes read is another one.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final

from .bench_frame import must_be
from .bench_read import read_rate
from .budget import slot_size
from .checkpoint import Checkpoint
from .damage import held_out_text
from .engine import Engine
from .errors import UsageError
from .find import find_model
from .kernels.choose import Kernels
from .loading import open_engine
from .measure import memory
from .registry import short
from .report import kernel_read_bytes
from .scheduler.counts import Counts
from .session_identity import weights_of
from .tiers.tier_disk import IN_FLIGHT
from .tokenizer import Tokenizer

LINE: Final = 0.4  #: seconds that the line rate is measured for, before and after each repeat
SLACK: Final = 1 << 20  #: bytes that the kernel may have read for this process beside the model's
_NO_SETTINGS: Final = ("watch", "scratch")
NOT_ALONE: Final = (
    "not all of the model has room, so that computing alone is not known and the bound is reading "
    "alone (--alone-ram may give it more)"
)
READ_MODES: Final = {"direct"}  #: of which the kernel counts what was asked for


def tokens_of(tokenizer: Tokenizer, text: str | None, count: int, seed: int) -> list[int]:
    """``count`` tokens of ``text`` (the embedded model's held-out text if None), from a place that
    ``seed`` draws on, and again from its beginning where it is shorter."""
    ids = tokenizer.encode(held_out_text() if text is None else text)
    if not ids:
        raise UsageError("The text is empty.", "Give one that is not.")
    begin = seed * 7919 % len(ids)
    return list(islice(cycle(ids[begin:] + ids[:begin]), count))


def about_model(checkpoint: Checkpoint, options: Mapping[str, Any]) -> dict[str, Any]:
    """Settings: which weights, and the options of loading that were given."""
    found = {"model": weights_of(checkpoint)}
    for name, value in options.items():
        if name not in _NO_SETTINGS and value not in (None, False, {}, "auto"):
            found[name] = short(str(value)) if name in ("policy", "predict") else str(value)
    return found


def computed_by(engine: Engine) -> str:
    """A fact of lines: what an engine computes with where nobody has chosen it."""
    there = engine.accelerator
    where = "cpu" if there is None else there.device.name
    return f"{where}, {engine.options.threads} threads, {engine.kernels.isa or 'torch kernels'}"


def digest(text: str | None) -> str:
    """Names a text in settings."""
    return "held out" if text is None else hashlib.sha256(text.encode()).hexdigest()[:12]


def everything_in_ram(engine: Engine) -> bool:
    """Whether nothing has to be read once it has been read: all experts, all layers, the head."""
    plan = engine.plan
    whole = plan.slots >= plan.experts and len(plan.resident_layers) == len(engine.spec.layers)
    return whole and plan.head_resident


def in_ram(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Figures of ``work`` when it reads no expert: the first time may bring some."""
    found = work()
    if found["expert_bytes"]:
        found = work()
    must_be("bytes of experts where all are in RAM", found["expert_bytes"], 0)
    return found


def share_of(text: str) -> float:
    """``25%`` -> 0.25.  Raises ``UsageError``."""
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not text.strip().endswith("%") or not 0 < share <= 1:
        raise UsageError(f"{text!r} is no share of the experts.", "Write it like 25%.")
    return share


def cache_of(checkpoint: Checkpoint, share: float | None) -> tuple[str, dict[str, int]]:
    """How a case with room for ``share`` of the experts is called, and the option that gives it
    that; None leaves it to the plan."""
    if share is None:
        return "as planned", {}
    return f"{100 * share:g}%", {"cache": cache_bytes(checkpoint, share)}


def opener(
    model: str | Path, sizes: Mapping[str, int | None], options: Mapping[str, Any]
) -> Callable[..., Engine]:
    """Opens ``model`` for ``sizes`` with ``options``, and with others that it is called with."""

    def opened(**more: Any) -> Engine:
        return open_engine(model, lambda tokenizer, spec: sizes, **{**options, **more})

    return opened


def bounded(
    found: Mapping[str, Any], line: float, alone: float | None, steps: int = 1
) -> dict[str, Any]:
    """Figures of ``steps`` that took ``found["seconds"]`` each, beside what bounds them: reading at
    ``line`` bytes/s, and the seconds of computing alone, if they are known."""
    seconds, reading = found["seconds"], found["bytes"] / steps / line
    useful = found["bytes"] - found["wasted_bytes"]
    return {
        "line_rate": line, "alone_seconds": alone, "read_seconds": reading,
        "of_bound": seconds / max(alone or 0.0, reading) if alone or reading else None,
        "line_used": useful / (seconds * steps * line),
    }  # fmt: skip


def must_have_room(engine: Engine, share: float | None) -> None:
    """Raise ``UsageError`` where the plan has less room than a case with ``share`` says."""
    wanted = 0 if share is None else max(1, round(share * engine.plan.experts))
    if engine.plan.slots < wanted:
        raise UsageError(
            f"{100 * (share or 0):g}% of the experts are {wanted:,}, and the plan has room for "
            f"{engine.plan.slots:,}.",
            "Give more --ram, or a smaller --share.",
        )


def cache_bytes(checkpoint: Checkpoint, share: float) -> int:
    """Bytes that have room for ``share`` of the experts, one at least."""
    return max(1, round(share * checkpoint.spec.expert_count)) * slot_size(checkpoint)


def room_to_read(checkpoint: Checkpoint) -> int:
    """Bytes that measuring the line rate takes beside an engine."""
    largest = checkpoint.expert_bytes if checkpoint.spec.moe else 16 << 20
    return IN_FLIGHT + 6 * largest


def line_rate(checkpoint: Checkpoint, seed: int) -> float:
    """Bytes a second that whole pages of the model are read with."""
    return read_rate(checkpoint, LINE, seed).rate


def scan_rate(threads: int) -> float:
    """Bytes a second that memory is read with."""
    return memory(threads).read


class Accounts:
    """What ``engine`` did since this was made.  Nothing else may read its files meanwhile."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        settle(engine)
        self._before = self._now()
        self._counts = engine.counts()

    def _now(self) -> dict[str, int]:
        disk, spilling = self._engine.disk.counts, self._engine.spilling
        scratch = 0 if spilling is None else sum(f["read_bytes"] for f in spilling.facts().values())
        return {
            "bytes": disk.bytes, "alignment_bytes": disk.overhead, "retries": disk.retries,
            "kernel_bytes": kernel_read_bytes(), "scratch_bytes": scratch,
        }  # fmt: skip

    @property
    def experts(self) -> Counts:
        """Requests of experts to RAM since then."""
        return minus(self._engine.counts()["experts"], self._counts["experts"])

    def read(self) -> dict[str, Any]:
        """Bytes by what they were read for, and requests of experts.  Raises ``K3Error``."""
        engine = self._engine
        settle(engine)
        gone = {name: value - self._before[name] for name, value in self._now().items()}
        c, page = self.experts, engine.checkpoint.expert_bytes if engine.spec.moe else 0
        check(c, page)
        now, before = engine.counts(), self._counts
        if all(now[kind].bytes == before[kind].bytes for kind in now if kind != "experts"):
            must_be("bytes of experts", c.bytes, gone["bytes"] - gone["scratch_bytes"])
        modes = set(engine.disk.counts.modes.values())
        kernel = gone.pop("kernel_bytes")
        if modes <= READ_MODES and not gone["retries"]:
            must_be("what the kernel says was read", kernel,
                    gone["bytes"] + gone["alignment_bytes"], SLACK)  # fmt: skip
            gone["kernel_bytes"] = kernel
        return {
            **gone, "expert_bytes": c.bytes,
            "requests": c.requests, "hits": c.hits, "late": c.late, "misses": c.misses,
            "prefetches": c.prefetches, "prefetch_bytes": c.prefetch_bytes,
            "wasted_bytes": c.wasted * page, "waited_seconds": c.wait_seconds,
            "mode": " and ".join(sorted(modes)) or "nothing read",
        }  # fmt: skip


def check(counts: Counts, page: int) -> None:
    """The identities of requests and bytes of pages of ``page`` bytes.  Raises ``K3Error``."""
    c = counts
    must_be("hits + late + misses", c.hits + c.late + c.misses, c.requests)
    must_be("bytes of experts", c.bytes, c.misses * page + c.prefetch_bytes)
    if not c.prefetches:
        must_be("bytes read ahead without reading ahead", c.prefetch_bytes, 0)


def minus(after: Counts, before: Counts) -> Counts:
    """What came between two moments."""
    return Counts(**{name: value - getattr(before, name) for name, value in vars(after).items()})


def settle(engine: Engine) -> None:
    """Wait until what was read ahead has come, as far as it will: a tenth of a second without
    another read."""
    last, since = -1, time.monotonic()
    while time.monotonic() - since < 0.1:
        if engine.disk.counts.reads != last:
            last, since = engine.disk.counts.reads, time.monotonic()
        time.sleep(0.01)


class Clock:
    """Processor time that the calling thread spends inside kernels: unlike time on the wall, what
    is left of it beside them is not stretched by whatever else the machine does."""

    def __init__(self, kernels: Kernels) -> None:
        self.seconds = 0.0
        self._inside = False
        kernels.wrap(self._timed)

    def _timed(self, name: str, f: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **rest: Any) -> Any:
            if self._inside:
                return f(*args, **rest)
            self._inside, begin = True, time.thread_time()
            try:
                return f(*args, **rest)
            finally:
                self.seconds += time.thread_time() - begin
                self._inside = False

        return call


def model_of(model: str | Path, options: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint, with what cannot be measured refused before anything is loaded."""
    if options.get("cache") is not None:
        raise UsageError("--cache is what is measured here.", "Give --share, repeatable.")
    return Checkpoint.open(find_model(model))

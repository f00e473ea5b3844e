"""The operators at the widths of a model, against a scan of memory and a large product of torch.

Only a configuration is needed: numbers are made up, and weights lie in an arena larger than a
core's caches, each call in another part of it.  Decode rows are bound by the weights' bytes, so
their bytes a second stand beside what a plain scan reads with as many threads; rows of prompts by
arithmetic, beside one large product of torch of the same types.  Both references take turns with
the operator, call by call, so that a drift of the machine favours neither.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F

from .bench_frame import Frame
from .config import GROUP_ROWS
from .engine import DTYPES
from .find import find_model
from .kernels import native
from .kernels.choose import Kernels
from .kernels.experts_reference import Job
from .kernels.linear_reference import Weight
from .kernels.workers import Workers, single_threaded
from .machine import default_threads, steady_allocator
from .measure import CHUNK, DEEP, Operators, weight_bytes
from .paths import show_path
from .plan_report import RELEASED, spec_of
from .rates import FORMATS

TURNS: Final = 0.3  #: seconds of a repeat, shared by the operator and its reference
DECODE_ROWS: Final = (1, 4, 8)
EXPERT_ROWS: Final = (1, 4)  #: of an expert in decode
PROMPT_ROWS: Final = (9, 32, 128, 350)  #: of an expert in prompts
SMALL: Final = 192  #: rows and columns of a weight that takes no time, to see what a call takes
MEANINGS: Final = {
    "seconds": "s a call, of the median call",
    "bytes_per_second": "bytes/s of weights",
    "of_scan": "of what a scan of memory reads",
    "macs_per_second": "multiply-adds/s",
    "of_torch": "of those of one large torch product of these types",
}

Task = Callable[[int], object]  #: call number


def kernels(
    frame: Frame,
    model: str | Path = RELEASED,
    *,
    dtype: str = "bfloat16",
    threads: int | None = None,
    isa: str | None = None,
    kernels: Mapping[str, str] | None = None,
) -> None:
    """Lines of all operators.  ``model``: a model, or a ``config.json``.  Raises ``ConfigError``,
    or ``UsageError`` for kernels that cannot be."""
    place = Path(model)
    if str(model) != RELEASED and not place.is_file():
        place = find_model(model)
    steady_allocator()
    workers = Workers(threads or default_threads())
    try:
        chosen = Kernels(workers, kernels, isa)
        spec = spec_of(place)
        bench = Operators(spec, chosen, DTYPES[dtype])
        frame.about["path"] = show_path(place)
        about = {
            "hidden": spec.hidden, "kda_width": spec.kda.width, "dtype": dtype,
            "threads": threads, "isa": isa, "kernels": str(dict(kernels)) if kernels else None,
        }  # fmt: skip
        frame.about["computed_by"] = f"{workers.threads} threads, {chosen.isa or chosen.why}"
        with torch.inference_mode(), single_threaded(), chosen.in_force():
            for case, measure in _cases(bench, workers):
                frame.case({**about, **case}, measure)
    finally:
        workers.close()


def _cases(
    bench: Operators, workers: Workers
) -> Iterator[tuple[dict[str, Any], Callable[[int], dict[str, Any]]]]:
    """Settings of each case, and what measures it once."""
    scan, product = _scan(bench, workers), _product(bench, workers.threads)
    n, k = bench.trunk_shape()
    for kind in FORMATS:
        own = bench.weights(kind, n, k)
        what = {"operator": "linear", "weight": f"{kind} {n} x {k}"}
        size = weight_bytes(kind, n, k)
        for rows in DECODE_ROWS:
            task = _linear(bench, own, k, rows, True)
            yield {**what, "rows": rows, "of": "decode"}, partial(_bytes, task, scan, size)
        task = _linear(bench, own, k, GROUP_ROWS, False)
        macs = GROUP_ROWS * n * k
        yield {**what, "rows": GROUP_ROWS, "of": "prompts"}, partial(_macs, task, product, macs)
        del own
    yield from _experts(bench, scan, product)
    for name, rate in (("mla_prefill", bench.attention), ("kda", bench.recurrence)):
        yield {"operator": name, "of": "prompts"}, partial(_rate, rate, product)
    small = bench.weights("bfloat16", SMALL, SMALL)
    yield (
        {"operator": "a call", "of": "decode"},
        partial(_call, _linear(bench, small, SMALL, 1, True)),
    )


def _experts(
    bench: Operators, scan: tuple[Task, int], product: tuple[Task, int]
) -> Iterator[tuple[dict[str, Any], Callable[[int], dict[str, Any]]]]:
    """Cases of routed experts, a few at a time."""
    m = bench.spec.moe
    if m is None:
        return
    kind = "mxfp4" if m.format == "mxfp4" else "bfloat16"
    up, down = bench.weights(kind, m.width, m.io), bench.weights(kind, m.io, m.width)
    what = {"operator": "experts", "weight": f"{kind} {m.width} x {m.io}"}
    size = bench.spec.expert_bytes
    for name, counts in (("decode", EXPERT_ROWS), ("prompts", PROMPT_ROWS)):
        for rows in counts:
            count = max(1, min(m.top_k, len(up) // 3, GROUP_ROWS // rows))
            x = bench.x(max(rows, GROUP_ROWS), m.io)
            call = partial(_triples, bench, (up, down), x, rows, count, name == "decode")
            case = {**what, "at_a_time": count, "rows": rows, "of": name}
            if name == "decode":
                yield case, partial(_bytes, call, scan, count * size)
            else:
                macs = count * rows * 3 * m.width * m.io
                yield case, partial(_macs, call, product, macs)


def _triples(
    bench: Operators, weights: tuple[list[Weight], list[Weight]], x: torch.Tensor, rows: int,
    count: int, decode: bool, i: int,
) -> None:  # fmt: skip
    """``count`` experts, each over ``rows`` rows, those that follow the ones of the last call."""
    up, down = weights
    some = [(i * count + j) % (len(up) // 3) * 3 for j in range(count)]
    jobs = [Job(up[t], up[t + 1], down[t + 2], range(rows)) for t in some]
    bench.kernels.experts(x, jobs, bench.act, decode)


def _linear(bench: Operators, own: list[Weight], k: int, rows: int, decode: bool) -> Task:
    x = bench.x(rows, k)
    return lambda i: bench.kernels.linear(x, own[i % len(own)], decode)


def _scan(bench: Operators, workers: Workers) -> tuple[Task, int]:
    """A scan of memory by all threads, and its bytes."""
    arena, size = bench.arena, min(len(bench.arena), workers.threads * CHUNK)
    places = len(arena) // size

    def scan(i: int) -> None:
        native.read(workers, arena.data_ptr() + i % places * size, size)

    def sums(i: int) -> None:
        some = arena[i % places * size :][:size].view(torch.float32).chunk(workers.threads)
        workers.map(lambda j: torch.dot(some[j], some[j]), workers.threads)  # type: ignore[arg-type]

    return (scan if native.available() else sums), size


def _product(bench: Operators, threads: int) -> tuple[Task, int]:
    """One large product of torch, and its multiply-adds."""
    x = torch.ones(GROUP_ROWS, DEEP, dtype=bench.dtype)
    w = torch.ones(DEEP, DEEP, dtype=bench.dtype)

    def product(i: int) -> None:
        with _torch_threads(threads):
            F.linear(x, w)

    return product, GROUP_ROWS * DEEP * DEEP


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def turns(*tasks: Task) -> list[float]:
    """Seconds of each task's median call, called in turns for ``TURNS`` seconds, the first calls
    not counted."""
    for task in tasks:
        task(0)
    times: list[list[float]] = [[] for _ in tasks]
    end = time.perf_counter() + TURNS
    while not times[-1] or time.perf_counter() < end:
        for task, own in zip(tasks, times, strict=True):
            begin = time.perf_counter()
            task(len(own) + 1)
            own.append(time.perf_counter() - begin)
    return [statistics.median(own) for own in times]


def _bytes(task: Task, scan: tuple[Task, int], size: int, seed: int) -> dict[str, Any]:
    """Figures of decode rows."""
    seconds, other = turns(task, scan[0])
    rate, scanned = size / seconds, scan[1] / other
    return {
        "seconds": seconds, "bytes_per_second": rate, "scan_rate": scanned,
        "of_scan": rate / scanned,
    }  # fmt: skip


def _macs(task: Task, product: tuple[Task, int], macs: int, seed: int) -> dict[str, Any]:
    """Figures of rows of prompts."""
    seconds, other = turns(task, product[0])
    rate, reached = macs / seconds, product[1] / other
    return {
        "seconds": seconds, "macs_per_second": rate, "torch_rate": reached,
        "of_torch": rate / reached,
    }  # fmt: skip


def _rate(rate: Callable[[], float], product: tuple[Task, int], seed: int) -> dict[str, Any]:
    """The same of an operator that is timed by ``measure.py``."""
    (other,) = turns(product[0])
    found, reached = rate(), product[1] / other
    return {"macs_per_second": found, "torch_rate": reached, "of_torch": found / reached}


def _call(task: Task, seed: int) -> dict[str, Any]:
    """What a call takes that has nothing to do."""
    return {"seconds": turns(task)[0]}

"""What this machine reaches: memory, products, our own kernels at a model's sizes, a layer's rest.

Every figure is the median of some repetitions of made-up work, as a run would find it: what else
this machine does meanwhile is part of it.
Weights lie in an arena larger than any cache of one core, as they do in a model, and are only
read.  Reads from disk are measured by ``bench_read.py``; ``rates.py`` says what the figures mean.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F

from .config import GROUP_ROWS, KDA_CHUNK, LATENT_BLOCK, ROW_TILE
from .engine import DTYPES
from .forecast_sizes import attended_pairs
from .kernels import native
from .kernels.choose import NATIVE, Kernels
from .kernels.experts_reference import Job
from .kernels.int8 import Int8Weight
from .kernels.linear_reference import DenseWeight, Weight
from .kernels.mixer import MixerRows, MixerWeights
from .kernels.mla_prefill_reference import Query
from .kernels.mxfp4 import Mxfp4Weight
from .kernels.workers import Workers, single_threaded
from .latents import Home, Latents, Ledger
from .layer_moe import activation
from .loading import load
from .machine import steady_allocator
from .rates import ASSUMED_DISK, EXPERTS, FORMATS, Rates
from .scheduler.sweep import Span, pack
from .spec import ModelSpec

ARENA = 512 << 20  #: bytes of made-up weights
CHUNK = 32 << 20  #: bytes of it that a thread scans at a time
SECONDS = 0.25  #: of each figure, beside its first call
DECODERS = 8  #: rows of the second decode figure
FEW, MANY = 16, 256  #: rows an expert gets, for the two points of a straight line
DEEP = 4096  #: rows and columns of the large products


def typical(work: Callable[[int], object], first: Callable[[int], object] | None = None) -> float:
    """Seconds that calls of ``work(i)`` took, i = 1, 2, ..: the median.  The call before them, of
    ``first`` or of ``work``, does not count."""
    (first or work)(0)
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while not times or time.perf_counter() < end:
        begin = time.perf_counter()
        work(len(times) + 1)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


@dataclass(frozen=True)
class Memory:
    """Bytes a second with ``threads`` threads: read by a scan, and copied (read and written)."""

    threads: int
    read: float
    copy: float


def memory(threads: int) -> Memory:
    """The bandwidth of main memory: the faster of the native scan, where there is one, and products
    of vectors; and copies.  ``CHUNK`` bytes a thread at a time."""
    arena = _arena()
    pairs = [part.chunk(2) for part in arena.view(torch.float32).chunk(ARENA // CHUNK)]
    workers, size = Workers(threads), min(ARENA, threads * CHUNK)

    def every_thread(work: Callable[[torch.Tensor, torch.Tensor], object]) -> float:
        """Bytes of pairs a second that go through ``work``."""

        def call(i: int) -> None:
            def task(j: int) -> None:
                work(*pairs[(i * threads + j) % len(pairs)])

            workers.map(task, threads)

        return threads * CHUNK / typical(call)

    def scan(i: int) -> None:
        native.read(workers, arena.data_ptr() + i % (ARENA // size) * size, size)

    with single_threaded():
        read, copied = every_thread(torch.dot), every_thread(lambda a, b: b.copy_(a))
    if native.available():
        read = max(read, size / typical(scan))
    workers.close()
    return Memory(threads, read, copied / 2)


def products(threads: int) -> dict[str, float]:
    """Multiply-adds a second of one large torch product of each type of operands."""
    before, rates = torch.get_num_threads(), {}
    torch.set_num_threads(threads)
    try:
        for name, dtype in DTYPES.items():
            x, w = torch.ones(GROUP_ROWS, DEEP, dtype=dtype), torch.ones(DEEP, DEEP, dtype=dtype)
            rates[name] = GROUP_ROWS * DEEP * DEEP / typical(lambda _: F.linear(x, w))  # noqa: B023
    finally:
        torch.set_num_threads(before)
    return rates


@dataclass(frozen=True)
class Measured:
    """All figures of one measurement, and the kernels that they are of."""

    rates: Rates
    memory: Memory
    products: dict[str, float]  #: multiply-adds a second of large torch products, by dtype
    isa: str | None  #: of the native kernels; None without them
    why: str
    chosen: dict[str, str]  #: operator -> backend


def measure(
    spec: ModelSpec, threads: int, dtype: str = "bfloat16", disk: float | None = None
) -> Measured:
    """Everything, for ``spec`` and activations in ``dtype``; takes some seconds.  ``disk``: bytes a
    second as measured elsewhere; assumed if None."""
    steady_allocator()  # as in a run, where memory of temporaries is new each time
    scan = memory(threads)
    workers = Workers(threads)
    kernels = Kernels(workers)
    with single_threaded():
        bench = Operators(spec, kernels, DTYPES[dtype])
        stream, extra, ready, macs = bench.tables()
        tile = bench.tile(ready[EXPERTS], macs[EXPERTS])
        rates = Rates(
            disk=disk or ASSUMED_DISK,
            ram=scan.read,
            stream=stream,
            extra=extra,
            ready=ready,
            macs=macs,
            tile=tile,
            macs32=extra["bfloat16"],  # decode rows, too, are computed in float32
            attention=bench.attention(),
            recurrence=bench.recurrence(),
            numbers=bench.row_wise(),
            layer=0.0,
            chunk=0.0,
            source="measured" if disk else "measured, the disk assumed",
        )
    workers.close()
    layer, chunk = overheads(threads, dtype)
    rates = replace(rates, layer=layer, chunk=chunk)
    return Measured(rates, scan, products(threads), kernels.isa, kernels.why, kernels.chosen)


def overheads(threads: int, dtype: str) -> tuple[float, float]:
    """Seconds that a layer, and a chunk of prompt rows in it, cost beside their numbers: the
    embedded model, whose layers are tiny, all of it in memory."""
    chunks, context = 8, 4096
    with load("nano", dtype=dtype, threads=threads, context=context, device="cpu") as engine:
        with engine.session() as session:

            def prompt(_: int) -> None:
                session.reset()
                session.append([0] * (chunks * KDA_CHUNK))
                session.logits()

            def step(_: int) -> None:
                session.append_sampled(0)
                session.logits()

            one, many = typical(step, first=prompt), typical(prompt)
        layers = len(engine.spec.layers)
    return one / layers, max(0.0, many - one) / layers / chunks


def _arena() -> torch.Tensor:
    """``ARENA`` bytes that are small normal numbers as bfloat16 and anything as codes."""
    block = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).bfloat16()
    return block.mul_(0.02).view(torch.uint8).repeat(ARENA // (2 << 20))


class Operators:
    """The operators at the sizes of ``spec``, weights taken from one arena."""

    def __init__(self, spec: ModelSpec, kernels: Kernels, dtype: torch.dtype) -> None:
        self.spec, self.kernels, self.dtype = spec, kernels, dtype
        self.arena = _arena()
        self.act = activation(spec)

    def x(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(self.dtype)

    def weights(self, kind: str, n: int, k: int) -> list[Weight]:
        """As many weights [n, k] as the arena holds, each in another place of it."""
        size = {"bfloat16": 2 * n * k, "int8": n * k, "mxfp4": n * k // 2}[kind]
        count = max(1, min(ARENA // size, 256))
        made: list[Weight] = []
        for i in range(count):
            raw = self.arena[i * size : (i + 1) * size]
            if kind == "bfloat16":
                made.append(DenseWeight(raw.view(torch.bfloat16).view(n, k)))
            elif kind == "int8":
                scale = torch.full((n, k // 64), 0.01, dtype=torch.bfloat16)
                made.append(Int8Weight(raw.view(torch.int8).view(n, k), scale))
            else:
                scale = torch.full((n, k // 32), 120, dtype=torch.uint8)
                made.append(Mxfp4Weight(raw.view(n, k // 2), scale))
        return made

    def tables(self) -> tuple[dict[str, float], ...]:
        """``stream``, ``extra``, ``ready``, ``macs`` of ``Rates``."""
        tables: tuple[dict[str, float], ...] = ({}, {}, {}, {})
        n, k = self.trunk_shape()
        for kind in FORMATS:
            own = self.weights(kind, n, k)
            for table, rate in zip(tables, self._linear(own, n, k, kind), strict=True):
                table[kind] = rate
        for table, rate in zip(tables, self._experts(), strict=True):
            table[EXPERTS] = rate
        return tables

    def trunk_shape(self) -> tuple[int, int]:
        """[N, K] near the model's larger matrices, both multiples of 64, 64 MB at most."""
        k = max(64, self.spec.hidden // 64 * 64)
        n = max(64, min(self.spec.kda.width, (32 << 20) // k) // 64 * 64)
        return n, k

    def _linear(self, own: Sequence[Weight], n: int, k: int, kind: str) -> tuple[float, ...]:
        def seconds(rows: int, decode: bool) -> float:
            x = self.x(rows, k)
            return typical(lambda i: self.kernels.linear(x, own[i % len(own)], decode))

        return _line(weight_bytes(kind, n, k), n * k, seconds, (ROW_TILE, GROUP_ROWS))

    def _experts(self) -> tuple[float, ...]:
        m = self.spec.moe
        if m is None:
            return (1.0,) * 4
        few = FEW if self.kernels.chosen["experts"] == NATIVE else ROW_TILE  # a whole tile
        macs = 3 * m.width * m.io
        return _line(self.spec.expert_bytes, macs, self._expert_seconds, (few, MANY))

    def tile(self, ready: float, macs: float) -> float:
        """How many rows of an expert in a prompt cost as much as one row does alone, by the rates
        of experts."""
        m = self.spec.moe
        if m is None:
            return 1.0
        beside = self._expert_seconds(1, False) - self.spec.expert_bytes / ready
        return min(max(1.0, beside * macs / (3 * m.width * m.io)), float(ROW_TILE))

    def _expert_seconds(self, rows: int, decode: bool) -> float:
        """Seconds of an expert with so many rows, among as many experts as a call may have."""
        m = self.spec.moe
        assert m is not None
        up, down = self._expert_weights
        x, own = self.x(max(rows, GROUP_ROWS), m.io), range(rows)
        triples = len(up) // 3
        count = min(m.top_k, triples, GROUP_ROWS // rows)

        def work(i: int) -> None:
            some = [(i * count + j) % triples * 3 for j in range(count)]
            jobs = [Job(up[t], up[t + 1], down[t + 2], own) for t in some]
            self.kernels.experts(x, jobs, self.act, decode)

        return typical(work) / count

    @cached_property
    def _expert_weights(self) -> tuple[list[Weight], list[Weight]]:
        m = self.spec.moe
        assert m is not None
        kind = "mxfp4" if m.format == "mxfp4" else "bfloat16"
        return self.weights(kind, m.width, m.io), self.weights(kind, m.io, m.width)

    def attention(self) -> float:
        """Multiply-adds a second of scores and sums of prompt attention, keys and values expanded
        on the way: a full group of rows after a block of latents."""
        m, after = self.spec.mla, LATENT_BLOCK
        rows = min(GROUP_ROWS, 2 * LATENT_BLOCK)
        latents = Latents(Home(torch.device("cpu"), Ledger(1 << 30)), m.latent, self.dtype)
        latents.append(self.x(after + rows, m.latent))
        (group,) = pack([Span(after, rows, False)])
        q = self.x(rows, m.heads, m.nope + m.rope)
        (up,) = self.weights("bfloat16", m.heads * (m.nope + m.v), m.kv_lora)[:1]
        queries = [Query(q[group.own(part)], part.start) for part in group.parts]
        scale, held = (m.nope + m.rope) ** -0.5, latents.length

        def work(_: int) -> None:
            self.kernels.mla_prefill(queries, latents.pieces(), held, up, m.nope, m.v, scale)

        seconds = typical(work)
        return attended_pairs(after, rows) * m.heads * (m.nope + m.rope + m.v) / seconds

    def recurrence(self) -> float:
        """Multiply-adds a second of a KDA layer between its projections, as ``forecast.py`` counts
        them: the recurrence's, convolutions and gates along with it."""
        kda, f = self.spec.kda, self.kernels
        wide = self.x(KDA_CHUNK, kda.width)
        rows = MixerRows([wide] * 3, wide, self.x(KDA_CHUNK, kda.heads), wide)
        tails = [torch.zeros(kda.conv - 1, kda.width, dtype=self.dtype) for _ in range(3)]
        state = torch.zeros(kda.heads, kda.head_dim, kda.head_dim)
        taps = (torch.ones(kda.width, kda.conv),) * 3
        ones, bias = torch.zeros(kda.heads), torch.zeros(kda.width)
        lower, norm = kda.gate_lower_bound, torch.ones(kda.head_dim)
        fixed = MixerWeights(taps, ones, bias, norm, lower, self.spec.eps)
        seconds = typical(lambda _: f.mixer(rows, tails, state, fixed, False))
        return KDA_CHUNK * kda.width * (4 * KDA_CHUNK + 3 * kda.head_dim) / seconds

    def row_wise(self) -> float:
        """Numbers a second through norms, mixes and sums of a layer over a full group."""
        spec, f = self.spec, self.kernels
        hidden = self.x(GROUP_ROWS, spec.hidden)
        norm, entries = torch.ones(spec.hidden, dtype=torch.bfloat16), [hidden] * 4

        def work(_: int) -> None:
            for _ in range(2):
                f.attnres(entries, norm, norm, spec.eps)
                f.rms_norm(hidden, norm, spec.eps)
                hidden + hidden

        return GROUP_ROWS * spec.hidden * (2 * 2 * len(entries) + 4 + 2) / typical(work)


def weight_bytes(kind: str, n: int, k: int) -> int:
    """Bytes of a weight [n, k] with its scales."""
    return {"bfloat16": 2 * n * k, "int8": n * k + n * k // 32, "mxfp4": n * k // 2 + n * k // 32}[
        kind
    ]


def _line(
    size: int, macs: int, seconds: Callable[[int, bool], float], points: tuple[int, int]
) -> tuple[float, float, float, float]:
    """``stream``, ``extra``, ``ready``, ``macs`` of a weight of ``size`` bytes and ``macs`` a row.

    ``seconds(rows, decode)`` is what the weight takes.

    A prompt's time is a straight line through two ``points``: size / ready + rows x macs / rate.  A
    point that noise moved must not make either part negative.
    """
    one, many = seconds(1, True), seconds(DECODERS, True)
    low, high = (seconds(rows, False) for rows in points)
    slope = max((high - low) / (points[1] - points[0]), high / points[1] / 4)
    base = max(high - slope * points[1], one / 16)
    further = max((many - one) / (DECODERS - 1), one / 1024)
    return size / one, macs / further, size / base, macs / slope

"""How long a sweep takes: a plan, a machine's rates and the model's sizes give seconds.

Pure arithmetic, no torch, no files.  What is assumed, and stated wherever a figure is shown:

* **Weights.** A decode row reads every weight that it uses once from memory; more rows of the same
  step use it while it is there.  Prompt rows use a weight in groups of ``GROUP_ROWS``, each of
  which reads (decodes) it once; an expert has its rows in tiles, the last of which is half full.
* **Routing** is uniform and independent of the past: ``n`` rows ask for E(1 - (1 - k/E)^n) of a
  layer's E experts.  A cache of s of S experts then holds what a decode row wants with the chance
  s/S, whatever its policy; text repeats itself, so a real one holds more (``hit_rate``).
  Prompts walk through the layers in a circle, which a cache of recent pages never answers unless
  it holds every expert: each touched expert is read once a sweep.
* **Overlap.** Reads of a layer's experts start when its router has spoken.  Until the last one is
  there the layer computes shared experts, latent projections and the experts that it has: a layer
  takes the time before its router has spoken, and then the longer of computing and of reads with
  what is computed when the last ones have come (``forecast_sizes.longer``).  What the disk has
  left goes to the trunk of the next streamed layer.  Of a single decode row some are guessed
  before the router has spoken (``guesses``), and read while the disk would have nothing to do.
* **Row-wise work** (norms, mixes, sums) counts the numbers it reads; attention and the KDA
  recurrence (with its convolutions and gates) count multiply-adds, decode rows also the state that
  they read.
* **Scratch files.** Latents that have no room in RAM are read back while attention computes, by a
  decode row once and by a prompt once for each group of rows, block summaries twice a layer; what
  comes before the router takes the longer of reading and computing.
* A trunk that is quantised while it streams is read as it is stored; only a pack reads less.

``rates.py`` says where a machine's rates come from.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from .budget import latent_form
from .config import GROUP_ROWS, KDA_CHUNK, ROW_TILE
from .forecast_sizes import attended_pairs, distinct, is_product, longer, tiled, weight_of
from .inventory import DENSE, HEAD, KDA, MLA, ROUTERS
from .rates import EXPERTS, Rates
from .spec import LayerSpec, ModelSpec

if TYPE_CHECKING:
    from .scheduler.plan import Plan

DISK, MEMORY, ARITHMETIC, OVERHEAD = "disk", "memory bandwidth", "arithmetic", "overhead"


@dataclass(frozen=True)
class Setup:
    """How a model runs.  ``packed``: the trunk lies on disk in the precision ``trunk``."""

    spec: ModelSpec
    plan: Plan
    rates: Rates
    dtype: str = "bfloat16"
    trunk: str = "bfloat16"
    packed: bool = False
    hit_rate: float | None = None  #: of decode requests by experts in RAM; None: uniform routing
    guesses: bool = True  #: whether experts are read ahead on guesses
    latent_dtype: str | None = None  #: None: as ``dtype``


class Cost(NamedTuple):
    """Seconds of computing, by what they are spent on."""

    memory: float = 0.0
    arithmetic: float = 0.0
    overhead: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(self)

    def plus(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Forecast:
    """One sweep of ``rows`` tokens.  Seconds by what they are spent on overlap one another, so
    their sum is more than ``seconds``."""

    rows: int
    seconds: float
    disk_seconds: float
    memory_seconds: float
    arithmetic_seconds: float
    overhead_seconds: float
    expert_bytes: float  #: read from disk
    trunk_bytes: float  #: read from disk
    scratch_bytes: float  #: latents and block summaries read back
    weight_bytes: float  #: of weights read from memory
    macs: float  #: multiply-adds of products with weights, attention apart
    experts: float  #: different experts asked for
    hit_rate: float

    @property
    def compute_seconds(self) -> float:
        return self.memory_seconds + self.arithmetic_seconds + self.overhead_seconds

    @property
    def limit(self) -> str:
        """What most of the time is spent on."""
        if self.disk_seconds >= self.compute_seconds:
            return DISK
        parts = {
            MEMORY: self.memory_seconds,
            ARITHMETIC: self.arithmetic_seconds,
            OVERHEAD: self.overhead_seconds,
        }
        return max(parts, key=lambda name: parts[name])

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "seconds_per_token": self.seconds / self.rows,
            "compute_seconds": self.compute_seconds,
            "limit": self.limit,
        }


def decode(setup: Setup, *, rows: int = 1, position: int = 0) -> Forecast:
    """One decode step: a token each of ``rows`` sequences that are ``position`` tokens long."""
    return _Sweep(setup, rows, position, True).forecast()


def prefill(setup: Setup, *, tokens: int, position: int = 0) -> Forecast:
    """One sweep over the next ``tokens`` tokens of a prompt, from ``position`` on."""
    return _Sweep(setup, tokens, position, False).forecast()


def prompt_seconds(setup: Setup, tokens: int) -> float:
    """A whole prompt of ``tokens`` tokens in sweeps of the plan's size.

    Attention grows with the position in a straight line, so the whole is the mean of the first and
    the last full sweep times their number, and what is left over.
    """
    size = min(tokens, setup.plan.sweep_rows)
    full, rest = divmod(tokens, size)
    first = prefill(setup, tokens=size)
    last = prefill(setup, tokens=size, position=(full - 1) * size)
    seconds = full * (first.seconds + last.seconds) / 2
    if rest:
        seconds += prefill(setup, tokens=rest, position=full * size).seconds
    return seconds


class _Work(NamedTuple):
    """What a layer's rows cost before its router has spoken and after it, ``one`` of its experts,
    and the bytes of its trunk and of scratch files that the sweep reads from disk."""

    before: Cost
    after: Cost
    one: float
    weight_bytes: float
    macs: float
    trunk: int
    scratch: float


class _Sweep:
    """The sums of one sweep: ``n`` rows of one kind from ``position`` on."""

    def __init__(self, setup: Setup, rows: int, position: int, decode: bool) -> None:
        self.setup, self.spec, self.rates = setup, setup.spec, setup.rates
        self.n, self.position, self.decode = rows, position, decode
        self.groups = -(-rows // GROUP_ROWS)
        self.form = latent_form(setup.spec, setup.dtype, setup.latent_dtype)
        self.itemsize = self.form.item
        m = self.spec.moe
        self.wanted = distinct(m.experts, m.top_k, rows) if m else 0.0  # of one layer
        self.missed = self.wanted * (1 - self._hit_rate())

    def _hit_rate(self) -> float:
        held, every = self.setup.plan.slots, self.spec.expert_count
        if held >= every:
            return 1.0
        if not self.decode:
            return 0.0
        given = self.setup.hit_rate
        return held / every if given is None else given

    def forecast(self) -> Forecast:
        spec, one = self.spec, self.spec.expert_bytes
        works = self._layers()
        head, kept = self._head()
        read = 0
        if not self.setup.plan.head_resident:
            read = kept if self.setup.packed else spec.vocab * spec.hidden * 2
        seconds = self._pass(works) + max(head.seconds, read / self.rates.disk)
        total = head
        for work in works:
            total = total.plus(work.before).plus(work.after)
        expert_bytes = self.missed * one * len(spec.moe_layers)
        trunk_bytes = read + sum(work.trunk for work in works)
        scratch_bytes = sum(work.scratch for work in works)
        return Forecast(
            rows=self.n,
            seconds=seconds,
            disk_seconds=(expert_bytes + trunk_bytes + scratch_bytes) / self.rates.disk,
            memory_seconds=total.memory,
            arithmetic_seconds=total.arithmetic,
            overhead_seconds=total.overhead,
            expert_bytes=expert_bytes,
            trunk_bytes=trunk_bytes,
            scratch_bytes=scratch_bytes,
            weight_bytes=kept + sum(work.weight_bytes for work in works),
            macs=sum(work.macs for work in works)
            + spec.vocab * spec.hidden * (self.n if self.decode else 1),
            experts=self.wanted * len(spec.moe_layers),
            hit_rate=1 - self.missed / self.wanted if self.wanted else 0.0,
        )

    def _pass(self, works: Sequence[_Work]) -> float:
        """Seconds from the first layer to the last, in a run of equal sweeps.

        The disk serves the experts of the present layer first; what it has left goes to the
        trunk of the next streamed layers, as many as the plan has buffers, the present one's
        included.  The second of two rounds counts: reading ahead goes on from sweep to sweep.
        """
        buffers, disk = self.setup.plan.ring_buffers, self.rates.disk
        streamed = [i for i, work in enumerate(works) if work.trunk]
        ahead: list[list[float]] = []  # [layer, seconds of reading left], in order
        upcoming = itertools.cycle(streamed)
        expert_seconds = self.missed * self.spec.expert_bytes / disk

        def read_ahead(seconds: float, room: int) -> None:
            while seconds > 0:
                if all(left == 0 for _, left in ahead):
                    if len(ahead) >= room:
                        return
                    layer = next(upcoming)
                    ahead.append([layer, works[layer].trunk / disk])
                done = min(seconds, ahead[-1][1])
                ahead[-1][1] -= done
                seconds -= done

        marks = []
        now = 0.0
        for _ in range(2):
            for i, work in enumerate(works):
                room = buffers
                if work.trunk:
                    if not ahead:
                        ahead.append([next(upcoming), work.trunk / disk])
                    now += ahead.pop(0)[1]
                    room -= 1
                experts = expert_seconds if self.spec.layers[i].ffn == "moe" else 0.0
                scratch = work.scratch / disk
                before = max(work.before.seconds, scratch)
                chance = self.wanted if self.decode and self.n == 1 else None
                idle = before - scratch if self.setup.guesses and not streamed else None
                after = longer(work.after.seconds, experts, work.one, self.missed, chance, idle)
                if streamed:
                    read_ahead(before - scratch + max(0.0, after - experts), room)
                now += before + after
            marks.append(now)
        return marks[1] - marks[0]

    def _stored(self, layer: LayerSpec) -> int:
        """Bytes of a layer's trunk as a sweep reads them from disk."""
        if not self.setup.packed:
            return self.spec.layer_trunk_bytes(layer.index)
        tensors = self.spec.layer_tensors(layer.index)
        return sum(weight_of(t, self.setup.trunk)[1] for t in tensors)

    def _layers(self) -> list[_Work]:
        """The work of every layer; those of one kind and as many block summaries are alike."""
        block, known = self.spec.attnres_block, {}
        works = []
        for layer in self.spec.layers:
            kind = (layer.attention, layer.ffn, layer.index // block if block else 0)
            if kind not in known:
                known[kind] = self._layer(layer)
            streams = layer.index not in self.setup.plan.resident_layers
            works.append(known[kind] if streams else known[kind]._replace(trunk=0))
        return works

    def _layer(self, layer: LayerSpec) -> _Work:
        before, after = self._mixing(layer), self._routed() if layer.ffn == "moe" else Cost()
        one = after.seconds / self.wanted if self.wanted else 0.0
        weights = macs = 0.0
        if layer.ffn == "moe":
            m = self.spec.moe
            assert m is not None
            weights += self.wanted * self.spec.expert_bytes
            macs += self.n * m.top_k * 3 * m.width * m.io
        for tensor in self.spec.layer_tensors(layer.index):
            if not is_product(tensor):
                continue
            kind, size = weight_of(tensor, self.setup.trunk)
            cost = self._product(kind, size, math.prod(tensor.shape))
            if tensor.group in (KDA, MLA, ROUTERS, DENSE):
                before = before.plus(cost)
            else:
                after = after.plus(cost)
            weights += size
            macs += self.n * math.prod(tensor.shape)
        scratch = self._summaries(layer)
        if layer.attention != "kda":
            scratch += self._latents()
        return _Work(before, after, one, weights, macs, self._stored(layer), scratch)

    def _product(self, kind: str, size: float, macs: float, rows: float | None = None) -> Cost:
        """``rows`` rows (all if None) times a weight of ``size`` bytes, ``macs`` a row."""
        rates = self.rates
        rows = self.n if rows is None else rows
        if self.decode:
            further = max(0.0, rows - 1) * macs / rates.extra[kind]
            return Cost(size / rates.stream[kind], further)
        groups = -(-rows // GROUP_ROWS)
        return Cost(groups * size / rates.ready[kind], rows * macs / rates.macs[kind])

    def _routed(self) -> Cost:
        """The routed experts of a layer, each with its share of the rows."""
        m = self.spec.moe
        assert m is not None
        macs, tile = 3 * m.width * m.io, 1 if self.decode else self.rates.tile
        rows = tiled(self.n * m.top_k / self.wanted, tile)
        one = self._product(EXPERTS, self.spec.expert_bytes, macs, rows)
        numbers = self.n * m.top_k * 3 * m.io  # outputs written, weighted and added up
        return Cost(*(self.wanted * part for part in one)).plus(self._row_wise(numbers))

    def _row_wise(self, numbers: float) -> Cost:
        return Cost(memory=numbers / self.rates.numbers)

    def _mixing(self, layer: LayerSpec) -> Cost:
        """Norms, mixes, attention or recurrence of a layer: all that is no product with weights."""
        spec, rates, n = self.spec, self.rates, self.n
        shared = spec.moe.shared_width if spec.moe else 0
        sums = 2 + layer.index // spec.attnres_block if spec.attnres_block else 1
        numbers = n * spec.hidden * (2 * 2 * sums + 4 + 2)  # two mixes that read twice, norms, sum
        numbers += n * 3 * (spec.dense_width if layer.ffn == "dense" else shared)
        chunks = 0 if self.decode else -(-n // KDA_CHUNK)
        cost = Cost(overhead=rates.layer + chunks * rates.chunk)
        if layer.attention == "kda":
            kda = spec.kda
            matrix = kda.width * kda.head_dim
            if self.decode:  # reads and writes its state
                cost = cost.plus(Cost(memory=n * 8 * matrix / rates.ram))
            else:
                macs = n * kda.width * (4 * KDA_CHUNK + 3 * kda.head_dim)
                cost = cost.plus(Cost(arithmetic=macs / rates.recurrence))
        else:
            cost = cost.plus(self._attention())
            numbers += n * spec.mla.heads * (spec.mla.nope + spec.mla.rope + 3 * spec.mla.v)
        return cost.plus(self._row_wise(numbers))

    def _attention(self) -> Cost:
        """MLA over what stands before: absorbed for decode rows, expanded for prompts."""
        m, rates = self.spec.mla, self.rates
        if self.decode:
            seen = self.n * (self.position + 1)
            cost = Cost(seen * self.form.row / rates.ram)
            if self.form.precision is not None:  # unpacked for a few blocks at a time
                cost = cost.plus(self._row_wise(seen * m.latent))
            return cost.plus(Cost(0.0, seen * m.heads * (m.latent + m.kv_lora) / rates.macs32))
        pairs = attended_pairs(self.position, self.n)
        return Cost(0.0, pairs * m.heads * (m.nope + m.rope + m.v) / rates.attention)

    def _latents(self) -> float:
        """Bytes that a layer's attention reads from disk: of what stands before, the part that RAM
        has no room for."""
        held = self.setup.plan.latents
        return 0.0 if held is None else self._beyond(held)

    def _beyond(self, held: float) -> float:
        """The same of what lies elsewhere than ``held`` bytes of all layers' latents."""
        tokens: float = self.position * (self.n if self.decode else 1)
        every = tokens * len(self.spec.mla_layers) * self.form.row
        spilled = max(0.0, 1 - held / every) if every else 0.0
        if not self.decode:  # each group of rows reads what stands before it
            tokens = self.groups * (self.position + GROUP_ROWS * (self.groups - 1) / 2)
        return spilled * tokens * self.form.row

    def _summaries(self, layer: LayerSpec) -> float:
        """Bytes of block summaries that a layer reads from disk, before each of its two mixes."""
        held, block, spec = self.setup.plan.summaries, self.spec.attnres_block, self.spec
        if held is None or block is None or self.n <= ROW_TILE:
            return 0.0
        row = spec.hidden * self.itemsize
        whole = self.n * row * -(-len(spec.layers) // block)
        return 2 * max(0.0, 1 - held / whole) * self.n * row * (1 + layer.index // block)

    def _head(self) -> tuple[Cost, int]:
        """The head for the rows whose logits are kept: all decode rows, a prompt's last one."""
        size = self.spec.vocab * self.spec.hidden
        kind, stored = self._head_weight()
        rows = self.n if self.decode else 1
        cost = Cost(stored / self.rates.stream[kind], (rows - 1) * size / self.rates.macs32)
        return cost, stored

    def _head_weight(self) -> tuple[str, int]:
        for tensor in self.spec.global_tensors():
            if tensor.group == HEAD:
                return weight_of(tensor, self.setup.trunk)
        return "bfloat16", self.spec.vocab * self.spec.hidden * 2  # tied: as the embedding

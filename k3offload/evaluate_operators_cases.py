"""The operators of ``kernels/choose.py`` as cases: real weights, random rows, what may differ.

A case says how one function of an operator is called on given weights; who computes it, and what
with, comes as a ``Hand``: the kernels that serve, or the references.  Which cases there are follows
from a layer's weights as they lie in memory, so every format of a checkpoint has its own.
Measuring and judging is ``evaluate_operators.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

import torch

from .arena import LayerWeights
from .config import LATENT_BLOCK, ROW_TILE
from .kernels import latent_format
from .kernels.choose import Kernels
from .kernels.experts_reference import Job
from .kernels.int8 import Int8Weight
from .kernels.latent_format import LatentFormat
from .kernels.latents_reference import pack
from .kernels.linear_reference import DenseWeight, Weight
from .kernels.mixer import MixerRows
from .kernels.mla_prefill_reference import Query
from .kernels.mxfp4 import Mxfp4Weight
from .layer_kda import fixed_weights
from .layer_moe import activation
from .spec import LayerSpec, ModelSpec, MoeSpec

Tensors = tuple[torch.Tensor, ...]
Expert = tuple[Weight, Weight, Weight]

DECODE, PROMPT = "decode", "prompt"
ROWS: Final = {DECODE: 4, PROMPT: ROW_TILE}
LENGTH: Final = LATENT_BLOCK + 44  #: latents that attention sees: a whole block and a part
EXACT: Final = 2e-5  #: sums in another order: of the largest value, see tests/contract
ROUND: Final = 2.0**-8  #: one rounding to bfloat16, of the largest value


class Hand(NamedTuple):
    """Who computes, by ``name``, and how it is given numbers: at ``where``; with ``wide``,
    activations are float32, so that nothing is rounded on the way."""

    name: str
    kernels: Kernels
    where: torch.device
    wide: bool = False

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of the activations ``x``."""
        kind = torch.float32 if self.wide and x.is_floating_point() else x.dtype
        return x.to(self.where, kind, copy=True)

    def put(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of anything else, as it is."""
        return x.to(self.where, copy=True)

    def held(self, x: torch.Tensor) -> torch.Tensor:
        """A weight: where it lies, or a copy on a device."""
        return x.to(self.where)

    def weight(self, weight: Weight) -> Weight:
        """The same of a matrix."""
        if self.where.type == "cpu":
            return weight
        if isinstance(weight, Int8Weight):
            return Int8Weight(self.held(weight.q), self.held(weight.scale))
        if isinstance(weight, Mxfp4Weight):
            return Mxfp4Weight(self.held(weight.packed), self.held(weight.scale))
        assert isinstance(weight, DenseWeight)
        return DenseWeight(self.held(weight.tensor))


class Case(NamedTuple):
    """``ready(hand)`` gives what runs it: a call without arguments, its results, and the states
    that it moves on, as of the call before it where it is called again."""

    op: str  #: of ``choose.OPS``, or ``mixer``
    part: str  #: a function of its files
    weights: str  #: their format, empty without weights that have one
    kind: str  #: of rows
    ready: Callable[[Hand], Callable[[], Tensors]]
    roundings: int  #: to bfloat16 on the way, where activations are bfloat16
    what: str = ""  #: which weight
    exact: float = EXACT
    wide: bool = True  #: the reference computes it on float32 rows
    read: Callable[[Tensors], Tensors] = lambda results: results  #: what is compared of results


def format_of(weight: Weight) -> str:
    """How a matrix lies in memory."""
    if isinstance(weight, Int8Weight):
        return "int8"
    if isinstance(weight, Mxfp4Weight):
        return "mxfp4"
    assert isinstance(weight, DenseWeight)
    return str(weight.tensor.dtype).removeprefix("torch.")


class Cases:
    """All cases of a model whose activations are ``dtype``; the same rows for the same ``seed``."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, seed: int) -> None:
        self.spec, self.dtype = spec, dtype
        self._draw = torch.Generator().manual_seed(seed)

    def _x(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*shape, generator=self._draw).to(dtype or self.dtype)

    # ---- layers ----

    def layer(self, layer: LayerSpec, w: LayerWeights) -> Iterator[Case]:
        """What a layer of this kind computes but its routed experts."""
        yield from self._matrices(w)
        yield from self._norms(w)
        yield from self._kda(w) if layer.attention == "kda" else self._mla(w)
        if layer.ffn == "dense":
            yield from self._mlp("mlp", w)
        else:
            yield from self._router(w)
            yield self._combine()
            assert self.spec.moe is not None
            if self.spec.moe.shared_width:
                yield from self._mlp("block_sparse_moe.shared_experts", w)

    def _matrices(self, w: LayerWeights) -> Iterator[Case]:
        """Every matrix that rows are multiplied with, but those that other operators take."""
        for item in w.items:
            name, shape = item.tensor.name, item.tensor.shape
            taken = ("conv1d.weight", "kv_b_proj.weight", "block_sparse_moe.gate.weight")
            if len(shape) == 2 and shape[0] > 1 and not name.endswith(taken):
                yield from self.linear(w.matrix(name), name)

    def linear(
        self, weight: Weight, what: str, dtype: torch.dtype | None = None, note: str = ""
    ) -> Iterator[Case]:
        """Products with one matrix; ``dtype``: of the rows, if it is not that of activations."""
        for kind, count in ROWS.items():
            x = self._x(count, weight.shape[1], dtype=dtype)

            def ready(
                hand: Hand, x: torch.Tensor = x, decode: bool = kind == DECODE
            ) -> Callable[[], Tensors]:
                rows, own = hand.rows(x), hand.weight(weight)
                return lambda: (hand.kernels.linear(rows, own, decode),)

            # weights of eight bits are rounded to bfloat16 as well, for rows of a prompt
            roundings = 0 if x.dtype == torch.float32 else 2
            yield Case("linear", "linear", format_of(weight) + note, kind, ready, roundings, what)

    def _norms(self, w: LayerWeights) -> Iterator[Case]:
        spec = self.spec
        x = self._x(ROW_TILE, spec.hidden)

        def norm(hand: Hand) -> Callable[[], Tensors]:
            rows, own = hand.rows(x), hand.held(w.vector("input_layernorm.weight"))
            return lambda: (hand.kernels.rms_norm(rows, own, spec.eps),)

        yield Case("rms_norm", "rms_norm", "", PROMPT, norm, 2)
        if spec.attnres_block is None:
            return
        site = "self_attention_res"
        vectors = [w.vector(f"{site}_{name}.weight") for name in ("norm", "proj")]
        entries = [self._x(ROW_TILE, spec.hidden) for _ in range(3)]

        def mix(hand: Hand) -> Callable[[], Tensors]:
            sums, own = [hand.rows(entry) for entry in entries], [hand.held(v) for v in vectors]
            return lambda: (hand.kernels.attnres(sums, own[0], own[1], spec.eps),)

        yield Case("attnres", "attnres", "", PROMPT, mix, 1)

    # ---- feed-forward ----

    def _mlp(self, prefix: str, w: LayerWeights) -> Iterator[Case]:
        gate, up, down = (w.matrix(f"{prefix}.{n}_proj.weight") for n in ("gate", "up", "down"))
        yield from self.experts([(gate, up, down)], prefix)

    def experts(self, experts: Sequence[Expert], what: str, note: str = "") -> Iterator[Case]:
        """Gated MLPs, each over all rows."""
        act = activation(self.spec)
        for kind, count in ROWS.items():
            x = self._x(count, experts[0][0].shape[1])

            def ready(
                hand: Hand, x: torch.Tensor = x, decode: bool = kind == DECODE
            ) -> Callable[[], Tensors]:
                rows, own, put = hand.rows(x), range(len(x)), hand.weight
                jobs = [Job(put(gate), put(up), put(down), own) for gate, up, down in experts]
                return lambda: (hand.kernels.experts(rows, jobs, act, decode),)

            weights = format_of(experts[0][0]) + note
            # gate, up and what is made of them are rounded, then the result, and the weights
            yield Case("experts", "experts", weights, kind, ready, 5, what)

    def _router(self, w: LayerWeights) -> Iterator[Case]:
        m, name = self.spec.moe, "block_sparse_moe.gate"
        assert m is not None
        gate, bias = w.matrix(f"{name}.weight"), w.vector(f"{name}.e_score_correction_bias")
        for kind, count in ROWS.items():
            x = self._x(count, self.spec.hidden)

            def ready(
                hand: Hand, x: torch.Tensor = x, decode: bool = kind == DECODE
            ) -> Callable[[], Tensors]:
                rows, own, add = hand.rows(x), hand.weight(gate), hand.held(bias)
                f, rest = hand.kernels.router, (m.top_k, m.renormalize, m.scale, decode)
                return lambda: f(rows, own, add, *rest)

            yield Case(
                "router", "router", format_of(gate), kind, ready, 0, f"{name}.weight",
                read=partial(_choice, bias=bias.float(), moe=m),
            )  # fmt: skip

    def _combine(self) -> Case:
        m = self.spec.moe
        assert m is not None
        x = self._x(ROW_TILE, m.io)
        at = torch.randint(0, ROW_TILE, (ROW_TILE, m.top_k), generator=self._draw)
        shares = torch.rand(ROW_TILE, m.top_k, generator=self._draw)

        def ready(hand: Hand) -> Callable[[], Tensors]:
            rows, places, weights = hand.rows(x), hand.put(at), hand.put(shares)
            return lambda: (hand.kernels.combine(rows, places, weights),)

        return Case("combine", "combine", "", PROMPT, ready, 1)

    # ---- KDA ----

    def _kda(self, w: LayerWeights) -> Iterator[Case]:
        kda, fixed = self.spec.kda, fixed_weights(w, self.spec)
        heads, dim, wide = kda.heads, kda.head_dim, kda.width

        def conv(hand: Hand) -> Callable[[], Tensors]:
            f, own = hand.kernels.serving("short_conv"), hand.held(fixed.convs[0])
            x, tail = hand.rows(rows), hand.rows(tails[0])
            return lambda: tuple(f(x, tail, own))

        def gate(hand: Hand) -> Callable[[], Tensors]:
            f, raw = hand.kernels.serving("kda_gate"), hand.rows(rows)
            a_log, bias = hand.held(fixed.a_log), hand.held(fixed.dt_bias)
            return lambda: (f(raw, a_log, bias, fixed.lower),)

        def unit(hand: Hand) -> Callable[[], Tensors]:
            f, x = hand.kernels.serving("l2_norm"), hand.put(q)
            return lambda: (f(x, 1e-6),)

        def out(hand: Hand) -> Callable[[], Tensors]:
            f, x, own = hand.kernels.serving("gated_norm"), hand.put(q), hand.held(fixed.norm)
            gates = hand.rows(rows)
            return lambda: (f(x, gates, own, fixed.eps),)

        rows, tails = self._x(ROW_TILE, wide), [self._x(kda.conv - 1, wide) for _ in range(3)]
        q = self._x(ROW_TILE, heads, dim, dtype=torch.float32)
        yield Case("short_conv", "short_conv", "", PROMPT, conv, 1)
        yield Case("kda_gate", "kda_gate", "", PROMPT, gate, 0)
        yield Case("kda_gate", "l2_norm", "", PROMPT, unit, 0)
        yield Case("kda_gate", "gated_norm", "", PROMPT, out, 1)
        yield from self._recurrence()
        beta = self._x(ROW_TILE, heads)
        state = self._x(heads, dim, dim, dtype=torch.float32) / dim
        for kind, count in ((DECODE, 1), (PROMPT, ROW_TILE)):

            def mixer(hand: Hand, n: int = count) -> Callable[[], Tensors]:
                own = fixed._replace(
                    convs=tuple(map(hand.held, fixed.convs)), a_log=hand.held(fixed.a_log),
                    dt_bias=hand.held(fixed.dt_bias), norm=hand.held(fixed.norm),
                )  # fmt: skip
                x, strength = hand.rows(rows[:n]), hand.rows(beta[:n])
                some = MixerRows([x] * 3, x, strength, x)
                last, now = [hand.rows(tail) for tail in tails], hand.put(state)
                f, decode = hand.kernels.mixer, n == 1
                return lambda: (f(some, last, now, own, decode), now, *last)

            yield Case("mixer", "mixer", "", kind, mixer, 2)

    def _recurrence(self) -> Iterator[Case]:
        heads, dim = self.spec.kda.heads, self.spec.kda.head_dim
        q, k, v, g = (self._x(ROW_TILE, heads, dim, dtype=torch.float32) for _ in range(4))
        q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
        g, beta = -g.abs(), torch.sigmoid(self._x(ROW_TILE, heads, dtype=torch.float32))
        state = self._x(heads, dim, dim, dtype=torch.float32) / dim

        def step(hand: Hand) -> Callable[[], Tensors]:
            f, now = hand.kernels.serving("kda_step"), hand.put(state)
            own = [hand.put(x[0]) for x in (q, k, v, g, beta)]
            return lambda: (f(*own, now, hand.kernels.workers), now)

        def chunk(hand: Hand) -> Callable[[], Tensors]:
            f, now = hand.kernels.serving("kda_chunk"), hand.put(state)
            own = [hand.put(x) for x in (q, k, v, g, beta)]
            return lambda: (f(*own, now, hand.kernels.workers), now)

        yield Case("kda", "kda_step", "", DECODE, step, 0)
        yield Case("kda", "kda_chunk", "", PROMPT, chunk, 0)

    # ---- MLA ----

    def _mla(self, w: LayerWeights) -> Iterator[Case]:
        m, name = self.spec.mla, "self_attn.kv_b_proj.weight"
        up, scale = w.matrix(name), (m.nope + m.rope) ** -0.5
        blocks = [self._x(LATENT_BLOCK, m.latent) for _ in range(2)]
        q = self._x(ROW_TILE, m.heads, m.nope + m.rope)

        def decode(hand: Hand) -> Callable[[], Tensors]:
            pieces, own, query = [[hand.rows(b) for b in blocks]], hand.weight(up), hand.rows(q[0])
            f = hand.kernels.mla_decode
            return lambda: (f(query, pieces, LENGTH, own, m.nope, m.v, scale),)

        def prefill(hand: Hand) -> Callable[[], Tensors]:
            pieces, own = [[hand.rows(b) for b in blocks]], hand.weight(up)
            queries, f = [Query(hand.rows(q), LENGTH - ROW_TILE)], hand.kernels.mla_prefill
            return lambda: tuple(f(queries, pieces, LENGTH, own, m.nope, m.v, scale))

        yield Case("mla_decode", "mla_decode", format_of(up), DECODE, decode, 0, name)
        # keys and values are expanded in the type of activations
        yield Case("mla_prefill", "mla_prefill", format_of(up), PROMPT, prefill, 2, name)
        for precision in latent_format.PRECISIONS:
            yield self._latents(precision)

    def _latents(self, precision: str) -> Case:
        """Packed latents of a precision; a number is defined to the last bit."""
        m = self.spec.mla
        form = LatentFormat(m.kv_lora, m.rope, self.dtype.itemsize, precision)
        blocks = [pack(self._x(LATENT_BLOCK, m.latent), form) for _ in range(2)]

        def ready(hand: Hand) -> Callable[[], Tensors]:
            f, own = hand.kernels.serving("unpack"), [hand.put(b) for b in blocks]
            out = torch.zeros(2, LATENT_BLOCK, m.latent, dtype=self.dtype, device=hand.where)

            def call() -> Tensors:
                f(own, LENGTH, form, out, workers=hand.kernels.workers)
                return (out,)

            return call

        what = f"latents in {precision}"
        return Case("latents", "unpack", precision, PROMPT, ready, 0, what, 0.0, False)


def _choice(results: Tensors, bias: torch.Tensor, moe: MoeSpec) -> Tensors:
    """What can be compared of a choice: the scores; those of the experts that were chosen, since
    experts of equal scores may change places; and the shares beside what follows from the scores
    without ``bias``."""
    chosen, share, scores = results
    best = scores.gather(1, chosen).sort(dim=1).values
    plain = (scores - bias).gather(1, chosen)
    if moe.renormalize:
        plain = plain / plain.sum(1, keepdim=True)
    return scores, best, share / (plain * moe.scale)

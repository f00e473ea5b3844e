"""The forward pass of one sweep over a ragged batch of runs, layer by layer, top to bottom.

It knows the order of the computation and nothing of where weights come from: a layer's trunk is
asked for, experts arrive.  All rows pass a layer before the next layer begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .adaptive import Adaptive
from .arena import LayerWeights
from .config import GROUP_ROWS, ROW_TILE
from .device_trunk import DeviceTrunk
from .errors import K3Error, NumericError
from .hooks import Hooks
from .kernels.choose import Kernels
from .kernels.workers import single_threaded
from .layer_kda import kda
from .layer_mla import mla
from .layer_moe import Ahead, OnLost, OnRoute, Side, mlp, moe, route
from .scheduler.schedule import Schedule
from .scheduler.store import ExpertStore
from .scheduler.sweep import Group, Part, Span, pack
from .spec import LayerSpec
from .state import SequenceState
from .stream import TILE, Mix, Resident, Spilled, Stream, own
from .tiers.base import PageId
from .tiers.spill import Spill
from .weights import Weights

SAMPLE = 256  #: rows of a prompt of which the next layer's router is asked, at most
Floats = npt.NDArray[np.float32]


class Sides(NamedTuple):
    """Who computes what: each layer, the routed experts, the head."""

    layers: tuple[Side, ...]
    experts: Side
    head: Side
    kernels: tuple[Kernels, ...]  #: all of them, each once
    blamed: Callable[[], AbstractContextManager[None]] = nullcontext  #: names a device in errors


@dataclass
class Run:
    """The next tokens of one sequence in a sweep.

    ``keep``: how many of its last rows get logits.  ``decode``: one token that was sampled.
    ``error`` is set when the run failed while others went on.
    """

    state: SequenceState
    tokens: Sequence[int]
    keep: int = 1
    decode: bool = False
    error: K3Error | None = None


Emit = Callable[[int, int, torch.Tensor], None]  #: run, first position, logits [n, V] float32


class Model:
    """K3's forward pass over ``weights`` and the expert store ``store``, computed at ``sides``."""

    def __init__(
        self,
        weights: Weights | DeviceTrunk,
        store: ExpertStore | Adaptive | None,
        sides: Sides,
        dtype: torch.dtype,
        schedule: Schedule | None = None,
        summaries: Spill[torch.Tensor] | None = None,
    ) -> None:
        """``summaries``: where block summaries go; they stay in memory if it is None."""
        self.spec = weights.spec
        self._weights, self._store, self._sides, self._dtype = weights, store, sides, dtype
        self._schedule, self._summaries = schedule, summaries
        self._experts = self.spec.moe.experts if self.spec.moe else 0
        self._hooks = Hooks()

    def sweep(self, runs: Sequence[Run], emit: Emit, hooks: Hooks) -> None:
        """Advance every run's state by its tokens and emit the logits of the rows it keeps.

        A run gets a ``NumericError`` in ``run.error`` whose numbers turn NaN or infinite, a
        ``ScratchError`` that loses what it moved to scratch files, a ``ReadError`` that chose an
        expert that cannot be read; the others are not touched by it.  Rows of a run that has an
        error, its own or one that a hook gave it, leave the sweep before the next layer.  Others
        leave all states broken, but for ``DoesNotFit`` and ``ScratchError``, before any has moved.
        """
        for run in runs:
            run.state.usable().reserve(len(run.tokens))
            run.state.failed = None
        groups = pack([Span(r.state.position, len(r.tokens), r.decode) for r in runs])
        sealed = self._sealed(rows := groups[-1].end)
        looks = self._schedule if isinstance(sealed, Resident) else None
        decodes = all(group.decode for group in groups) and isinstance(sealed, Resident)
        ahead = looks if decodes else None
        self._hooks = hooks
        on_route = hooks.routing(ahead)
        guesses = ahead if ahead and ahead.begin(rows, self._experts) else None
        watched = hooks.wants and decodes and not looks and rows <= GROUP_ROWS  # all pages are here
        for run in runs:  # until the last line, whatever ends the sweep
            run.state.broken = "a sweep was interrupted"
        try:
            with self._sides.blamed(), single_threaded(), ExitStack() as in_force:
                for kernels in self._sides.kernels:
                    in_force.enter_context(kernels.in_force())
                alone = decodes and len(self._sides.kernels) == 1
                in_force.enter_context(self._sides.kernels[0].put_off(rows if alone else 0))
                stream = self._stream(runs, groups, sealed)
                for layer in self.spec.layers:
                    hooks.before_layer(layer.index)
                    groups = stream.leave(groups, {i for i, r in enumerate(runs) if r.error})
                    if not groups:
                        break  # nobody wants the rest
                    stream.move(self._sides.layers[layer.index])
                    with self._weights.layer(layer.index) as w:
                        self._attention(layer, stream, groups, runs, w)
                        for run in runs:
                            run.error = run.error or run.state.failed
                        lost = partial(_lose, groups, runs, hooks)
                        look = partial(self._look_ahead, layer, stream, guesses)
                        early = look if guesses or watched else None
                        self._feed_forward(layer, stream, groups, w, on_route, lost, early)
                        if looks and early is None:
                            self._read_on(layer, stream, looks)
                        stream.side.kernels.finish()  # its memory may go to another layer
                else:
                    self._check(stream, groups, runs)
                    stream.move(self._sides.head)
                    self._head(stream, groups, runs, emit)
            if guesses and not any(run.error for run in runs):
                guesses.end()
        except BaseException as error:
            for run in runs:
                run.state.broken = f"a sweep was interrupted ({type(error).__name__}: {error})"
            raise
        for run in runs:
            run.state.advance(len(run.tokens), run.decode)
            run.state.broken = None if run.error is None else run.error.problem.rstrip(".")

    def _sealed(self, rows: int) -> Resident | Spilled:
        """A place for the summaries of a sweep; what a few rows need is always in memory."""
        if self._summaries is None or rows <= ROW_TILE:
            return Resident()
        block = self.spec.attnres_block or len(self.spec.layers)
        count = -(-len(self.spec.layers) // block)
        self._summaries.check(count * -(-rows // TILE))
        return Spilled(self._summaries)

    def _stream(
        self, runs: Sequence[Run], groups: Sequence[Group], sealed: Resident | Spilled
    ) -> Stream:
        """The residual stream as it begins: the embedding of every row."""
        tokens: list[int] = []
        for part in _parts(groups):
            first = part.start - runs[part.run].state.position
            tokens += runs[part.run].tokens[first : first + part.count]
        side = self._sides.layers[0]
        p = side.kernels.here(self._weights.embed(tokens, self._dtype))[0]
        return Stream(p, side, sealed)

    def _attention(
        self,
        layer: LayerSpec,
        stream: Stream,
        groups: Sequence[Group],
        runs: Sequence[Run],
        w: LayerWeights,
    ) -> None:
        """p <- p + attn(norm(mix)); at a block start the raw sum is sealed and p <- attn(...)."""
        block = self.spec.attnres_block
        seals = block is not None and layer.index % block == 0
        before = stream.p
        if seals:
            stream.p = stream.sealed.seal(before)
        states = [run.state for run in runs]
        sublayer, kernels = kda if layer.attention == "kda" else mla, stream.side.kernels
        mix = self._mix(stream, w, "self_attention_res", 0)
        mixed = stream.sealed.mixed(groups, None if seals else before, mix)
        for group, h in zip(groups, mixed, strict=True):
            x = kernels.rms_norm(h, w.vector("input_layernorm.weight"), self.spec.eps)
            y = sublayer(x, group, states, w, self.spec, kernels)
            base = None if seals else own(before, group)
            kernels.residual(base, y, None, own(stream.p, group))

    def _feed_forward(
        self,
        layer: LayerSpec,
        stream: Stream,
        groups: Sequence[Group],
        w: LayerWeights,
        on_route: OnRoute | None,
        on_lost: OnLost,
        ahead: Ahead | None,
    ) -> None:
        """p <- p + ffn(norm(mix)).  ``ahead`` is called as early as what it looks at is known."""
        kernels = stream.side.kernels
        mixed = stream.sealed.mixed(groups, stream.p, self._mix(stream, w, "mlp_res", 1))

        def normed(group: Group) -> torch.Tensor:
            """Asked for each group once, in their order."""
            norm = w.vector("post_attention_layernorm.weight")
            return kernels.rms_norm(next(mixed), norm, self.spec.eps)

        def emit(group: Group, y: torch.Tensor, shared: torch.Tensor | None) -> None:
            p = own(stream.p, group)
            peaks = kernels.residual(p, y, shared, p, peaks=True)
            assert peaks is not None
            stream.peaks.append(peaks)

        if layer.ffn == "dense":
            for group in groups:
                x = normed(group)
                emit(group, mlp(x, "mlp", w, self.spec, kernels, group.decode), None)
            if ahead is not None:
                ahead(None, None)
            return
        assert self._store is not None
        moe(
            normed, emit, groups, w, self.spec, self._store, self._weights.expert, kernels,
            self._sides.experts, on_route, on_lost, ahead,
        )  # fmt: skip

    def _look_ahead(
        self,
        layer: LayerSpec,
        stream: Stream,
        schedule: Schedule | None,
        latent: torch.Tensor | None,
        shared: torch.Tensor | None,
    ) -> None:
        """Tell the predictor, and who watches, what they ask about the next layer: the stream with
        ``shared`` experts, without routed ones, foretells as well as all of it (see LOG.md)."""
        following = self.spec.layers[layer.index + 1 :][:1]
        if not following or following[0].ffn != "moe":
            return
        asks = schedule if schedule and schedule.asks() else None
        index, scores, wants = following[0].index, None, self._hooks.wants
        if not asks and not wants:
            return
        if (asks and asks.asks_router) or "router" in wants:
            scores = self._next_router(index, stream, None, shared)[1]
        stream.side.kernels.finish()
        wanted = (asks and asks.asks_latent) or "latent" in wants
        told = [scores, latent.float() if wanted and latent is not None else None]
        some = [tensor for tensor in told if tensor is not None]
        host = iter(stream.side.kernels.to_host(*some) if some else ())
        likely, given = (None if tensor is None else next(host).numpy() for tensor in told)
        self._hooks.on_ahead(layer.index, index, likely, given)
        if asks:
            asks.ahead(layer.index, index, likely, given)

    def _read_on(self, layer: LayerSpec, stream: Stream, schedule: Schedule) -> None:
        """In a crowd of rows most experts come anyway: begin with those that many will choose,
        which the disk brings while the next layer attends."""
        following = self.spec.layers[layer.index + 1 :][:1]
        if not following or following[0].ffn != "moe" or not schedule.asks_router:
            return
        assert self.spec.moe is not None
        stream.side.kernels.finish()  # rows are picked of what is there
        index, rows = following[0].index, stream.p.shape[0]
        picked = torch.arange(0, rows, -(-rows // SAMPLE))
        chosen, _ = self._next_router(index, stream, picked, None)
        if chosen is not None:
            numbers = stream.side.kernels.to_host(chosen)[0].numpy()
            schedule.read_on(index, numbers, self.spec.moe.experts)

    def _next_router(
        self, index: int, stream: Stream, rows: torch.Tensor | None, more: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What the router of the next layer, ``index``, says to the stream as it stands and
        ``more``, that layer's attention left out: experts [n, k] and scores [n, E] of ``rows``, or
        of all rows of a decode sweep.  None where its weights are not at hand."""
        near = self._sides.layers[index] == stream.side
        w = self._weights.peek(index) if near else None
        if w is None:
            return None, None
        # Sealed or not, the next layer mixes the same sums, but for what its attention adds.
        assert isinstance(stream.sealed, Resident)
        kernels, sums = stream.side.kernels, [*stream.sealed.sums, stream.p]
        if more is not None:
            kernels.residual(sums.pop(), more, None, p := torch.empty_like(stream.p))
            sums.append(p)
        if rows is not None:
            (at,) = kernels.here(rows)
            sums = [entry[at] for entry in sums]
        h = self._mix(stream, w, "mlp_res")(sums)
        x = kernels.rms_norm(h, w.vector("post_attention_layernorm.weight"), self.spec.eps)
        chosen, _, scores = route(x, w, self.spec, kernels, decode=rows is None)
        return chosen, scores

    def _mix(self, stream: Stream, w: LayerWeights, site: str, watched: int | None = None) -> Mix:
        """How sums are mixed at ``site``, row by row; ``watched``: the sublayer's number."""

        def mix(entries: Sequence[torch.Tensor]) -> torch.Tensor:
            if self.spec.attnres_block is None or len(entries) == 1:
                return entries[-1]
            norm, query = w.vector(f"{site}_norm.weight"), w.vector(f"{site}_proj.weight")
            if self._hooks.on_mix is not None and watched is not None:
                stream.side.kernels.finish()
                self._hooks.on_mix(w.layer, watched, entries, norm, query, self.spec.eps)
            return stream.side.kernels.attnres(entries, norm, query, self.spec.eps)

        return mix

    def _check(self, stream: Stream, groups: Sequence[Group], runs: Sequence[Run]) -> None:
        """Give runs whose numbers are no longer finite their errors, which name the first layer.
        Once for all layers, since it waits for what they gave."""
        kernels, peaks = stream.side.kernels, stream.peaks
        kernels.finish()
        if not peaks[0].is_cpu:  # one copy for all
            peaks = [torch.cat(peaks)]
        peaks = kernels.to_host(*peaks)
        if all(math.isfinite(peak) for some in peaks for peak in some.tolist()):
            return
        finite = torch.isfinite(torch.cat(peaks).view(len(self.spec.layers), -1))  # [layers, R]
        for layer, rows in zip(self.spec.layers, finite, strict=True):
            for part in _parts(groups):
                run = runs[part.run]
                if run.error is None and not bool(rows[part.row : part.row + part.count].all()):
                    run.error = NumericError(
                        f"Layer {layer.index} gave NaN or infinity for a token at position "
                        f"{part.start} or after it.",
                        "The sequence's state was dropped. Run k3offload check MODEL --full; "
                        "if it finds nothing, try --dtype float32.",
                    )

    def _head(
        self, stream: Stream, groups: Sequence[Group], runs: Sequence[Run], emit: Emit
    ) -> None:
        """Logits in float32 of the rows that are kept, 64 rows of one kind at a time."""
        w, kernels = self._weights.globals, stream.side.kernels
        kernels.finish()
        mix = self._mix(stream, w, "output_attn_res")
        for decode in (True, False):
            parts = _parts([group for group in groups if group.decode == decode])
            wanted = [
                (part.run, part.start + i, part.row + i)
                for part in parts
                if runs[part.run].error is None
                for i in range(part.count)
                if _kept(runs[part.run], part.start + i)
            ]
            for i in range(0, len(wanted), ROW_TILE):
                some = wanted[i : i + ROW_TILE]
                h = mix(stream.picked([row for _, _, row in some]))
                x = kernels.rms_norm(h, w.vector("norm.weight"), self.spec.eps)
                kernels.finish()
                (logits,) = kernels.to_host(self._logits(x.float(), kernels, decode))
                for j, (run, position, _) in enumerate(some):
                    emit(run, position, logits if len(some) == 1 else logits[j : j + 1])

    def _logits(self, x: torch.Tensor, kernels: Kernels, decode: bool) -> torch.Tensor:
        """[n, V] float32 of ``x`` [n, H] float32."""
        logits: torch.Tensor | None = None
        for begin, end, weight in self._weights.head_blocks():
            block = kernels.linear(x, weight, decode)
            kernels.finish()
            if end - begin == self.spec.vocab:
                logits = block
                continue
            if logits is None:
                logits = block.new_empty(x.shape[0], self.spec.vocab)
            logits[:, begin:end] = block
        assert logits is not None
        return logits


def _lose(
    groups: Sequence[Group], runs: Sequence[Run], hooks: Hooks, page: PageId, rows: Sequence[int],
    error: K3Error,
) -> None:  # fmt: skip
    """``page`` cannot be read: those of ``runs`` whose ``rows`` chose it fail with ``error``."""
    hooks.on_lost(page)
    for part in _parts(groups):
        if any(part.row <= row < part.row + part.count for row in rows):
            run = runs[part.run]
            run.error = run.error or error


def _parts(groups: Sequence[Group]) -> list[Part]:
    """All parts of ``groups``, in the order of their rows."""
    return [part for group in groups for part in group.parts]


def _kept(run: Run, position: int) -> bool:
    """Whether ``run`` wants the logits after ``position``."""
    return position >= run.state.position + len(run.tokens) - run.keep

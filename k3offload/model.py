"""The forward pass of one sweep over a ragged batch of runs, layer by layer, top to bottom.

It knows the order of the computation and nothing of where weights come from: a layer's trunk is
asked for, experts arrive.  All rows pass a layer before the next layer begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from .config import ROW_TILE
from .errors import K3Error, NumericError
from .kernels.attnres_reference import attnres
from .kernels.linear_reference import linear
from .kernels.rms_norm_reference import rms_norm
from .kernels.workers import Workers, single_threaded
from .layer_kda import kda
from .layer_mla import GROUP_TILES, mla
from .layer_moe import OnRoute, moe, named_mlp
from .scheduler.store import ExpertStore
from .scheduler.sweep import Span, Tile, pack
from .spec import LayerSpec
from .state import SequenceState
from .weights import LayerWeights, Weights


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


@dataclass
class Hooks:
    """What may watch or stop a sweep: ``before_layer(l)`` may raise, ``on_route`` sees routing."""

    before_layer: Callable[[int], None] = lambda layer: None
    on_route: OnRoute | None = None


@dataclass
class _Stream:
    """The residual stream: ``p`` [R, H] the running sum, ``summaries`` the sealed blocks."""

    p: torch.Tensor
    summaries: list[torch.Tensor] = field(default_factory=list)


class Model:
    """K3's forward pass over ``weights`` and the expert store ``store``."""

    def __init__(
        self, weights: Weights, store: ExpertStore | None, workers: Workers, dtype: torch.dtype
    ) -> None:
        self.spec = weights.spec
        self._weights, self._store, self._workers, self._dtype = weights, store, workers, dtype

    def sweep(self, runs: Sequence[Run], emit: Emit, hooks: Hooks) -> None:
        """Advance every run's state by its tokens and emit the logits of the rows it keeps.

        A run whose numbers turn NaN or infinite gets a ``NumericError`` in ``run.error``; the
        others are not touched by it.  Any other error leaves all states of the sweep broken, but
        for ``DoesNotFit``, which comes before any state has moved.
        """
        for run in runs:
            run.state.usable().reserve(len(run.tokens))
        tiles = pack([Span(r.state.position, len(r.tokens), r.decode) for r in runs])
        for run in runs:  # until the last line, whatever ends the sweep
            run.state.broken = "a sweep was interrupted"
        try:
            with single_threaded():
                stream = _Stream(self._embed(runs, tiles))
                for layer in self.spec.layers:
                    hooks.before_layer(layer.index)
                    with self._weights.layer(layer.index) as w:
                        self._attention(layer, stream, tiles, runs, w)
                        self._feed_forward(layer, stream, tiles, w, hooks.on_route)
                    self._check(layer.index, stream, tiles, runs)
                self._head(stream, tiles, runs, emit)
        except BaseException as error:
            for run in runs:
                run.state.broken = f"a sweep was interrupted ({type(error).__name__}: {error})"
            raise
        for run in runs:
            run.state.position += len(run.tokens)
            run.state.broken = None if run.error is None else run.error.problem.rstrip(".")

    def _embed(self, runs: Sequence[Run], tiles: Sequence[Tile]) -> torch.Tensor:
        rows = torch.zeros(len(tiles) * ROW_TILE, self.spec.hidden, dtype=self._dtype)
        for tile in tiles:
            tokens: list[int] = []
            for part in tile.parts:
                first = part.start - runs[part.run].state.position
                tokens += runs[part.run].tokens[first : first + part.count]
            rows[tile.begin : tile.begin + tile.used] = self._weights.embed(tokens, self._dtype)
        return rows

    def _attention(
        self,
        layer: LayerSpec,
        stream: _Stream,
        tiles: Sequence[Tile],
        runs: Sequence[Run],
        w: LayerWeights,
    ) -> None:
        """p <- p + attn(norm(mix)); at a block start the raw sum is sealed and p <- attn(...)."""
        block = self.spec.attnres_block
        seals = block is not None and layer.index % block == 0
        before = stream.p
        if seals:
            stream.summaries.append(before)
            stream.p = torch.empty_like(before)
        sources = [*stream.summaries] if seals else [*stream.summaries, before]
        states = [run.state for run in runs]

        def normed(tile: Tile) -> torch.Tensor:
            h = self._mix([s[tile.rows] for s in sources], w, "self_attention_res")
            return rms_norm(h, w.vector("input_layernorm.weight"), self.spec.eps)

        def emit(tile: Tile, y: torch.Tensor) -> None:
            stream.p[tile.rows] = y if seals else before[tile.rows] + y

        if layer.attention == "kda":
            for tile in tiles:
                emit(tile, kda(normed(tile), tile, states, w, self.spec, self._workers))
            return
        for i in range(0, len(tiles), GROUP_TILES):
            group = tiles[i : i + GROUP_TILES]
            ys = mla([normed(t) for t in group], group, states, w, self.spec, self._workers)
            for tile, y in zip(group, ys, strict=True):
                emit(tile, y)

    def _feed_forward(
        self,
        layer: LayerSpec,
        stream: _Stream,
        tiles: Sequence[Tile],
        w: LayerWeights,
        on_route: OnRoute | None,
    ) -> None:
        """p <- p + ffn(norm(mix))."""
        sources = [*stream.summaries, stream.p]

        def normed(tile: Tile) -> torch.Tensor:
            h = self._mix([s[tile.rows] for s in sources], w, "mlp_res")
            return rms_norm(h, w.vector("post_attention_layernorm.weight"), self.spec.eps)

        def emit(tile: Tile, z: torch.Tensor) -> None:
            stream.p[tile.rows] += z

        if layer.ffn == "dense":
            for tile in tiles:
                emit(tile, named_mlp(normed(tile), "mlp", w, self.spec, self._workers))
            return
        assert self._store is not None
        moe(
            normed, emit, tiles, w, self.spec, self._store, self._weights.expert, self._workers,
            on_route,
        )  # fmt: skip

    def _mix(self, entries: Sequence[torch.Tensor], w: LayerWeights, site: str) -> torch.Tensor:
        if self.spec.attnres_block is None or len(entries) == 1:
            return entries[-1]
        norm, query = w.vector(f"{site}_norm.weight"), w.vector(f"{site}_proj.weight")
        return attnres(entries, norm, query, self.spec.eps)

    def _check(
        self, layer: int, stream: _Stream, tiles: Sequence[Tile], runs: Sequence[Run]
    ) -> None:
        if bool(torch.isfinite(stream.p).all()):
            return
        for tile in tiles:
            for part in tile.parts:
                first = tile.begin + part.at
                rows = stream.p[first : first + part.count]
                run = runs[part.run]
                if run.error is None and not bool(torch.isfinite(rows).all()):
                    run.error = NumericError(
                        f"Layer {layer} gave NaN or infinity for a token at position "
                        f"{part.start} or after it.",
                        "The sequence's state was dropped. Run k3offload check MODEL --full; "
                        "if it finds nothing, try --dtype float32.",
                    )

    def _head(
        self, stream: _Stream, tiles: Sequence[Tile], runs: Sequence[Run], emit: Emit
    ) -> None:
        """Logits in float32 of the rows that are kept, 64 rows at a time."""
        wanted = [
            (part.run, part.start + i, tile.begin + part.at + i)
            for tile in tiles
            for part in tile.parts
            for i in range(part.count)
            if runs[part.run].error is None
            and part.start + i
            >= runs[part.run].state.position + len(runs[part.run].tokens) - runs[part.run].keep
        ]
        w, sources = self._weights.globals, [*stream.summaries, stream.p]
        for i in range(0, len(wanted), ROW_TILE):
            some = wanted[i : i + ROW_TILE]
            rows = torch.tensor([row for _, _, row in some])
            padded = [s.new_zeros(ROW_TILE, self.spec.hidden) for s in sources]
            for tile_rows, source in zip(padded, sources, strict=True):
                tile_rows[: len(some)] = source[rows]
            h = self._mix(padded, w, "output_attn_res")
            x = rms_norm(h, w.vector("norm.weight"), self.spec.eps).float()
            logits = torch.empty(len(some), self.spec.vocab)
            for begin, end, weight in self._weights.head_blocks():
                logits[:, begin:end] = linear(x, weight, self._workers)[: len(some)]
            for j, (run, position, _) in enumerate(some):
                emit(run, position, logits[j : j + 1])

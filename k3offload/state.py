"""What a sequence carries between sweeps: KDA matrices, conv tails, MLA latents (``latents.py``).

The KDA state is constant in size and cannot be cut back, so going back needs a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from .config import KDA_CHUNK
from .errors import DoesNotFit, ScratchError, SessionError
from .kernels.latent_format import LatentFormat
from .kernels.latents_reference import kept
from .latents import Home, HomeOf, Latents, Ledger, SpilledLatents
from .spec import ModelSpec


class SequenceState:
    """State of one sequence after ``position`` tokens, for all layers.

    ``home_of``: where each layer's part lives; all in RAM, under ``ledger``, if it is None.
    ``packed``: the precision that latents are kept in, if it is not that of activations.
    """

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, ledger: Ledger, home_of: HomeOf | None = None,
        packed: str | None = None,
    ) -> None:  # fmt: skip
        self.spec, self.dtype, self._ledger = spec, dtype, ledger
        self.form = LatentFormat(spec.mla.kv_lora, spec.mla.rope, dtype.itemsize, packed)
        self.position = 0
        self.cold = True  # all of it was prefilled, and never cut inside a chunk
        self._marks: list[_Mark] = []
        self.broken: str | None = None  # why the state cannot be used any more
        self.failed: ScratchError | None = None  # what it lost in the sweep under way
        here = Home(torch.device("cpu"), ledger)
        self._home_of = home_of = home_of or (lambda layer: here)
        kda = spec.kda
        each = spec.kda_state_bytes(dtype.itemsize) // max(1, len(spec.kda_layers))
        constant = {ledger: spec.vocab * 4}  # a row of logits
        for layer in spec.kda_layers:
            own = home_of(layer).ledger
            constant[own] = constant.get(own, 0) + each
        for own, size in constant.items():
            own.charge(self, size, "A sequence's KDA state")
        self.kda = {
            layer: torch.zeros(kda.heads, kda.head_dim, kda.head_dim, device=home_of(layer).where)
            for layer in spec.kda_layers
        }
        self.conv = {
            layer: torch.zeros(3, kda.conv - 1, kda.width, dtype=dtype, device=home_of(layer).where)
            for layer in spec.kda_layers
        }
        self.latents: dict[int, Latents | SpilledLatents] = {}
        for layer in spec.mla_layers:
            self.latents[layer] = home_of(layer).latents(*kept(self.form, dtype))

    @property
    def nbytes(self) -> int:
        """Bytes of what it holds: KDA states, conv tails, rows of latents."""
        item = self.dtype.itemsize
        rows = self.position * len(self.spec.mla_layers) * self.form.row
        return self.spec.kda_state_bytes(item) + rows

    def bytes_after(self, position: int) -> int:
        """What a ledger is charged for a state after ``position`` tokens that shares nothing."""
        fixed = self.spec.kda_state_bytes(self.dtype.itemsize) + self.spec.vocab * 4
        return fixed + sum(latents.bytes_after(position) for latents in self.latents.values())

    def usable(self) -> SequenceState:
        """Itself, or ``SessionError`` if an interrupted sweep left it half advanced."""
        if self.broken is not None:
            raise SessionError(
                f"This sequence's state was lost: {self.broken}.",
                "Go back with rewind(snapshot), or reset() and append the tokens again.",
            )
        return self

    def reserve(self, count: int) -> None:
        """Make room for ``count`` more tokens in all layers, before a sweep changes anything.

        Raises ``DoesNotFit``, or ``ScratchError`` where no room is left on disk, and then holds no
        more than before.
        """
        spilled = [la for la in self.latents.values() if isinstance(la, SpilledLatents)]
        if spilled:
            spilled[0].spill.check(sum(latents.filled_by(count) for latents in spilled))
        try:
            for latents in self.latents.values():
                latents.reserve(count)
        except DoesNotFit:
            for latents in self.latents.values():
                latents.release()
            raise

    def advance(self, count: int, decode: bool) -> None:
        """``count`` more tokens are computed, as a decode run or as a prompt's."""
        self.cold = self.cold and not decode and self.position % KDA_CHUNK == 0
        self.position += count

    @contextmanager
    def losing(self) -> Iterator[None]:
        """What the block cannot write to scratch files or read back ends this sequence alone: the
        sweep goes on for others, and sees it in ``failed``."""
        try:
            yield
        except ScratchError as error:
            self.failed = error.with_traceback(None)
            for latents in self.latents.values():
                if isinstance(latents, SpilledLatents):
                    latents.drop()

    def copy(self) -> SequenceState:
        """An independent copy; full latent blocks are shared since they never change."""
        self.usable()
        packed = self.form.precision
        other = SequenceState(self.spec, self.dtype, self._ledger, self._home_of, packed)
        other.take(self)
        return other

    def take(self, source: SequenceState) -> None:
        """Become, from nothing, what ``source`` is; full latent blocks are shared."""
        source.usable()
        for layer in self.kda:
            self._take_layer(source, layer)
        self.take_latents(source, source.position, True)

    # ---- snapshots on the way ----

    def mark(
        self, position: int, into: SequenceState, keep: Callable[[SequenceState], None]
    ) -> None:
        """Let the new state ``into`` become what this one is after ``position`` tokens, a multiple
        of the KDA chunk that the next sweep passes.  ``settle`` then gives it to ``keep``, which
        has to let it ``take_latents``."""
        self._marks.append(_Mark(position, into, keep))

    def passed(self, layer: int, position: int, finish: Callable[[], None]) -> None:
        """KDA layer ``layer`` has advanced to ``position``, within a sweep, or will have after
        ``finish``."""
        for mark in self._marks:
            if mark.position == position:
                finish()
                mark.into._take_layer(self, layer)

    def settle(self) -> None:
        """After a sweep, however it ended: give away the marks that it passed, drop the others."""
        marks, self._marks = self._marks, []
        for mark in marks:
            if self.broken is None and mark.position <= self.position:
                mark.keep(mark.into)

    def take_latents(self, source: SequenceState, position: int, borrow: bool = False) -> None:
        """Be after ``position`` tokens, with the latents of ``source``: shared as far as the own
        ledger pays for them or, with ``borrow``, anyone's.  Raises ``DoesNotFit``."""
        self.latents = {}  # the bytes of their open blocks are needed for those of the copies
        for layer, latents in source.latents.items():
            self.latents[layer] = latents.copy(self._home_of(layer), position, borrow)
        self.position, self.cold = position, source.cold

    def _take_layer(self, source: SequenceState, layer: int) -> None:
        self.kda[layer].copy_(source.kda[layer])
        self.conv[layer].copy_(source.conv[layer])


class _Mark(NamedTuple):
    """Where a snapshot is taken, the state that becomes it, and who gets it."""

    position: int
    into: SequenceState
    keep: Callable[[SequenceState], None]

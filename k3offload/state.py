"""What a sequence carries between sweeps: KDA matrices, conv tails and MLA latents.

The KDA state is constant in size and cannot be cut back, so going back needs a copy.  Latents
grow by blocks of 256 tokens; a full block never changes again, so copies share it.  Every byte is
charged to the engine's ledger before it is allocated.  Where latents spill, the ledger has the one
block of a layer that is not full, and the full ones belong to ``tiers/spill.py``.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from .config import KDA_CHUNK, LATENT_BLOCK, show_size
from .errors import DoesNotFit, ScratchError, SessionError
from .kernels.latent_format import LatentFormat
from .kernels.latents_reference import kept
from .kernels.pieces import Pieces
from .spec import ModelSpec
from .tiers.base import Buffer
from .tiers.spill import Block, Spill, SpillArray


class Ledger:
    """The bytes set aside for sequence state; refuses what would break the budget.

    ``spare`` is room inside the budget that the plan gave to nothing else; ``beyond`` says how
    much of it has been used at most.
    """

    def __init__(self, planned: int, spare: int = 0) -> None:
        self.planned = planned
        self.capacity = planned + spare
        self.used = 0
        self._most = 0

    def charge(self, owner: object, size: int, what: str) -> None:
        """Count ``size`` bytes until ``owner`` is garbage; raises ``DoesNotFit`` before use."""
        if self.used + size > self.capacity:
            missing = self.used + size - self.capacity
            raise DoesNotFit(
                f"{what} needs {show_size(size)} and the plan has {show_size(self.capacity)} for "
                f"sequence state, {show_size(self.used)} of it in use.",
                "Close sessions or snapshots, or load with more sessions=, context= or ram=.",
                missing=missing,
            )
        self.used += size
        self._most = max(self._most, self.used)
        weakref.finalize(owner, self._release, size)

    @property
    def beyond(self) -> int:
        """Bytes that were used at most beyond what was planned."""
        return max(0, self._most - self.planned)

    def _release(self, size: int) -> None:
        self.used -= size


class Home(NamedTuple):
    """Where a layer's state lives, the ledger of the bytes there, and where its full latent blocks
    go if they do not all stay there."""

    where: torch.device
    ledger: Ledger
    spill: Spill[torch.Tensor] | None = None


_SERIALS = itertools.count()


class _Block:
    """Rows of one latent block; ``data`` beyond the owner's length is never read.

    No other block of this process has the same ``serial``; rows never change once written.
    """

    def __init__(self, home: Home, width: int, dtype: torch.dtype) -> None:
        self.serial, self.home = next(_SERIALS), home
        size = LATENT_BLOCK * width * dtype.itemsize
        home.ledger.charge(self, size, f"A latent block of {LATENT_BLOCK} tokens")
        self.data = torch.empty(LATENT_BLOCK, width, dtype=dtype, device=home.where)


class Latents:
    """The MLA latents of one layer of one sequence: [length, width], numbers or packed bytes."""

    def __init__(self, home: Home, width: int, dtype: torch.dtype) -> None:
        self._home, self.width, self.dtype = home, width, dtype
        self._blocks: list[_Block] = []
        self.length = 0

    def append(self, rows: torch.Tensor) -> None:
        """Add ``rows`` [n, width] after the last token."""
        self.reserve(rows.shape[0])
        done = 0
        while done < rows.shape[0]:
            at = self.length % LATENT_BLOCK
            n = min(LATENT_BLOCK - at, rows.shape[0] - done)
            block = self._blocks[self.length // LATENT_BLOCK]
            block.data[at : at + n] = rows[done : done + n]
            done += n
            self.length += n

    def reserve(self, count: int) -> None:
        """Make room for ``count`` more tokens; ``DoesNotFit`` if the ledger has none."""
        while len(self._blocks) * LATENT_BLOCK < self.length + count:
            self._blocks.append(_Block(self._home, self.width, self.dtype))

    def release(self) -> None:
        """Give back what was reserved and holds no token."""
        del self._blocks[self.blocks :]

    @property
    def blocks(self) -> int:
        """Blocks that hold tokens."""
        return -(-self.length // LATENT_BLOCK)

    def rows(self, index: int) -> torch.Tensor:
        """Block ``index`` as it lies, [256, width]; rows beyond ``length`` may hold anything."""
        return self._blocks[index].data

    def pieces(self) -> Pieces:
        """All blocks that hold tokens, for attention."""
        return [[block.data for block in self._blocks[: self.blocks]]]

    @property
    def serials(self) -> list[int]:
        """One number for each block: blocks of the same number share their rows."""
        return [block.serial for block in self._blocks[: self.blocks]]

    def copy(self, home: Home, length: int, borrow: bool = True) -> Latents:
        """An independent copy of the first ``length`` rows, living at ``home``.

        Full blocks that lie there already are shared; without ``borrow`` only those that
        ``home``'s own ledger pays for.  The others are charged to it.
        """
        other = Latents(home, self.width, self.dtype)
        for index in range(-(-length // LATENT_BLOCK)):
            block = self._blocks[index]
            there = block.home.where == home.where and (borrow or block.home.ledger is home.ledger)
            count = min(LATENT_BLOCK, length - index * LATENT_BLOCK)
            if count == LATENT_BLOCK and there:
                other._blocks.append(block)
                other.length += count
            else:  # an open block may still change
                other.append(self.rows(index)[:count])
        return other


class SpilledLatents:
    """As ``Latents``, but for full blocks, of which only the newest are sure to be in RAM."""

    def __init__(self, home: Home, width: int, dtype: torch.dtype) -> None:
        assert home.spill is not None
        self.width, self.dtype, self.spill = width, dtype, home.spill
        self._array: SpillArray | None = None  # of the own full blocks
        self._full: list[Block] = []
        self._open = _Block(home, width, dtype)  # the block that is not full
        self._serials = [self._open.serial]  # of all blocks
        self.length = 0

    def append(self, rows: torch.Tensor) -> None:
        """Add ``rows`` [n, width] after the last token.  Raises ``ScratchError``."""
        done = 0
        while done < rows.shape[0]:
            at = self.length % LATENT_BLOCK
            n = min(LATENT_BLOCK - at, rows.shape[0] - done)
            self._open.data[at : at + n] = rows[done : done + n]
            done += n
            self.length += n
            if at + n == LATENT_BLOCK:
                self._array = self._array or self.spill.array("latents", self.length - LATENT_BLOCK)
                self._full.append(self._array.append(_bytes(self._open.data)))
                self._serials.append(next(_SERIALS))

    def reserve(self, count: int) -> None:
        """The open block is there; ``SequenceState`` asks for the others of all layers at once."""

    def release(self) -> None:
        """Nothing was reserved."""

    def filled_by(self, count: int) -> int:
        """Blocks that ``count`` more tokens fill."""
        return (self.length % LATENT_BLOCK + count) // LATENT_BLOCK

    @property
    def blocks(self) -> int:
        """Blocks that hold tokens."""
        return -(-self.length // LATENT_BLOCK)

    def rows(self, index: int) -> torch.Tensor:
        """A copy of block ``index``, or the open one as it lies, [256, width]; rows beyond
        ``length`` may hold anything.  Raises ``ScratchError``."""
        if index == len(self._full):
            return self._open.data
        return self.spill.view(self.spill.copy(self._full[index]))

    def pieces(self) -> Pieces:
        """All blocks that hold tokens, for attention.  Raises ``ScratchError`` on the way."""
        tail = [self._open.data] if self.length % LATENT_BLOCK else []
        return self.spill.pieces(self._full, tail)

    @property
    def serials(self) -> list[int]:
        """One number for each block: blocks of the same number share their rows."""
        return self._serials[: self.blocks]

    def copy(self, home: Home, length: int, borrow: bool = True) -> SpilledLatents:
        """An independent copy of the first ``length`` rows, living at ``home``, which has the same
        spill.  Full blocks are shared: no ledger pays for them.  Raises ``ScratchError``."""
        assert home.spill is self.spill
        other, full = SpilledLatents(home, self.width, self.dtype), length // LATENT_BLOCK
        other._full, other.length = self._full[:full], full * LATENT_BLOCK
        other._serials[:0] = self._serials[:full]
        if rest := length % LATENT_BLOCK:
            other.append(self.rows(full)[:rest])
        return other

    def drop(self) -> None:
        """Let go of the full blocks: the state is lost, and others may need the room."""
        self._full.clear()


def _bytes(block: torch.Tensor) -> Buffer:
    """The memory of ``block``, which lies in RAM."""
    data: Buffer = block.view(-1).view(torch.uint8).numpy()
    return data


HomeOf = Callable[[int], Home]  #: of a layer


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
            home = home_of(layer)
            kind = Latents if home.spill is None else SpilledLatents
            self.latents[layer] = kind(home, *kept(self.form, dtype))

    @property
    def nbytes(self) -> int:
        """Bytes of what it holds: KDA states, conv tails, rows of latents."""
        item = self.dtype.itemsize
        rows = self.position * len(self.spec.mla_layers) * self.form.row
        return self.spec.kda_state_bytes(item) + rows

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

    def passed(self, layer: int, position: int) -> None:
        """KDA layer ``layer`` has advanced to ``position``, within a sweep."""
        for mark in self._marks:
            if mark.position == position:
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
        self.latents = {
            layer: latents.copy(self._home_of(layer), position, borrow)
            for layer, latents in source.latents.items()
        }
        self.position, self.cold = position, source.cold

    def _take_layer(self, source: SequenceState, layer: int) -> None:
        self.kda[layer].copy_(source.kda[layer])
        self.conv[layer].copy_(source.conv[layer])


class _Mark(NamedTuple):
    """Where a snapshot is taken, the state that becomes it, and who gets it."""

    position: int
    into: SequenceState
    keep: Callable[[SequenceState], None]

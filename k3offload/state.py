"""What a sequence carries between sweeps: KDA matrices, conv tails and MLA latents.

The KDA state is constant in size and cannot be cut back, so going back needs a copy.  Latents
grow by blocks of 256 tokens; a full block never changes again, so copies share it.  Every byte is
charged to the engine's ledger before it is allocated.  Where latents spill, the ledger has the one
block of a layer that is not full, and the full ones belong to ``tiers/spill.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from .config import LATENT_BLOCK, show_size
from .errors import DoesNotFit, ScratchError, SessionError
from .kernels.pieces import Pieces
from .spec import ModelSpec
from .tiers.base import Buffer
from .tiers.spill import Block, Spill


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
    spill: Spill | None = None


class _Block:
    """Rows of one latent block; ``data`` beyond the owner's length is never read."""

    def __init__(self, home: Home, width: int, dtype: torch.dtype) -> None:
        size = LATENT_BLOCK * width * dtype.itemsize
        home.ledger.charge(self, size, f"A latent block of {LATENT_BLOCK} tokens")
        self.data = torch.empty(LATENT_BLOCK, width, dtype=dtype, device=home.where)


class Latents:
    """The MLA latents of one layer of one sequence: [length, kv_lora + rope]."""

    def __init__(self, home: Home, width: int, dtype: torch.dtype) -> None:
        self._home, self._width, self._dtype = home, width, dtype
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
            self._blocks.append(_Block(self._home, self._width, self._dtype))

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

    def copy(self) -> Latents:
        other = Latents(self._home, self._width, self._dtype)
        other._blocks, other.length = self._blocks[: self.blocks], self.length
        if self.length % LATENT_BLOCK:  # the open block is the only one that may still change
            last = _Block(self._home, self._width, self._dtype)
            last.data.copy_(other._blocks[-1].data)
            other._blocks[-1] = last
        return other


class SpilledLatents:
    """As ``Latents``, but for full blocks, of which only the newest are sure to be in RAM."""

    def __init__(self, home: Home, width: int, dtype: torch.dtype, shared: int = 0) -> None:
        """``shared``: blocks that it will begin with, of another one."""
        assert home.spill is not None
        self._home, self._width, self._dtype, self.spill = home, width, dtype, home.spill
        self._array = home.spill.array("latents", shared * LATENT_BLOCK)
        self._full: list[Block] = []
        self._open = _Block(home, width, dtype)  # the block that is not full
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
                self._full.append(self._array.append(_bytes(self._open.data)))

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
        return self._tensor(self.spill.copy(self._full[index]))

    def pieces(self) -> Pieces:
        """All blocks that hold tokens, for attention.  Raises ``ScratchError`` on the way."""
        tail = [_bytes(self._open.data)] if self.length % LATENT_BLOCK else []
        for piece in self.spill.pieces(self._full, tail):
            yield [self._tensor(data) for data in piece]

    def _tensor(self, data: Buffer) -> torch.Tensor:
        return torch.from_numpy(data).view(self._dtype).view(LATENT_BLOCK, self._width)

    def copy(self) -> SpilledLatents:
        other = SpilledLatents(self._home, self._width, self._dtype, len(self._full))
        other._full, other.length = [*self._full], self.length
        other._open.data.copy_(self._open.data)
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
    """

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, ledger: Ledger, home_of: HomeOf | None = None
    ) -> None:
        self.spec, self._dtype, self._ledger = spec, dtype, ledger
        self.position = 0
        self.broken: str | None = None  # why the state cannot be used any more
        self.failed: ScratchError | None = None  # what it lost in the sweep under way
        here = Home(torch.device("cpu"), ledger)
        self._home_of = home_of = home_of or (lambda layer: here)
        kda, mla = spec.kda, spec.mla
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
            self.latents[layer] = kind(home, mla.latent, dtype)

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
        other = SequenceState(self.spec, self._dtype, self._ledger, self._home_of)
        other.position = self.position
        for layer, matrix in self.kda.items():
            other.kda[layer].copy_(matrix)
            other.conv[layer].copy_(self.conv[layer])
        other.latents = {layer: latents.copy() for layer, latents in self.latents.items()}
        return other

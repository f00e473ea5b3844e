"""MLA latents of a sequence in RAM or on a device, or the newest of them, and who pays for them.

They grow by blocks of 256 tokens; a full block never changes again, so copies share it.  Every byte
is charged to a ledger before it is allocated.  Where latents spill, the ledger has the one block of
a layer that is not full, and the full ones belong to ``tiers/spill.py``.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .config import LATENT_BLOCK, align_up, show_size
from .errors import DoesNotFit
from .kernels.pieces import Pieces
from .tiers.base import Buffer
from .tiers.spill import Spill, SpillArray


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
    go if they do not all stay there, by way of what ``kind`` knows."""

    where: torch.device
    ledger: Ledger
    spill: Spill[torch.Tensor] | None = None
    kind: Callable[[Home, int, torch.dtype], SpilledLatents] | None = None

    def latents(self, width: int, dtype: torch.dtype) -> Latents | SpilledLatents:
        """Those of a layer, none yet."""
        if self.kind is not None:
            return self.kind(self, width, dtype)
        return (Latents if self.spill is None else SpilledLatents)(self, width, dtype)


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

    def next_row(self) -> torch.Tensor:
        """Where the next token's row lies, [1, width], for who writes it: it counts from now on."""
        self.reserve(1)
        index, at = divmod(self.length, LATENT_BLOCK)
        self.length += 1
        return self._blocks[index].data[at : at + 1]

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

    def bytes_after(self, length: int) -> int:
        """Bytes of the blocks that ``length`` tokens take."""
        return align_up(length, LATENT_BLOCK) * self.width * self.dtype.itemsize

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
        self._full: list[Any] = []  # what ``_put`` made of them
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
                self._full.append(self._put(self._array))
                self._serials.append(next(_SERIALS))

    def _put(self, array: SpillArray) -> Any:
        """The open block, which is full, as a block of ``array``."""
        return array.append(_bytes(self._open.data))

    def reserve(self, count: int) -> None:
        """The open block is there; ``SequenceState`` asks for the others of all layers at once."""

    def release(self) -> None:
        """Nothing was reserved."""

    def bytes_after(self, length: int) -> int:
        """Bytes in RAM for good: the block that is not full."""
        return LATENT_BLOCK * self.width * self.dtype.itemsize

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
        return self._read(self._full[index])

    def _read(self, block: Any) -> torch.Tensor:
        return self.spill.view(self.spill.copy(block))

    def pieces(self) -> Pieces:
        """All blocks that hold tokens, for attention.  Raises ``ScratchError`` on the way."""
        tail = [self._open.data] if self.length % LATENT_BLOCK else []
        return self._pieces(tail)

    def _pieces(self, tail: list[torch.Tensor]) -> Pieces:
        return self.spill.pieces(self._full, tail)

    @property
    def serials(self) -> list[int]:
        """One number for each block: blocks of the same number share their rows."""
        return self._serials[: self.blocks]

    def copy(self, home: Home, length: int, borrow: bool = True) -> SpilledLatents:
        """An independent copy of the first ``length`` rows, living at ``home``, which has the same
        spill.  Full blocks are shared: no ledger pays for them.  Raises ``ScratchError``."""
        assert home.spill is self.spill
        other, full = home.latents(self.width, self.dtype), length // LATENT_BLOCK
        assert isinstance(other, SpilledLatents)
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

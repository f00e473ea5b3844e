"""What a sequence carries between sweeps: KDA matrices, conv tails and MLA latents.

The KDA state is constant in size and cannot be cut back, so going back needs a copy.  Latents
grow by blocks of 256 tokens; a full block never changes again, so copies share it.  Every byte is
charged to the engine's ledger before it is allocated.
"""

from __future__ import annotations

import weakref

import torch

from .config import LATENT_BLOCK, show_size
from .errors import DoesNotFit, SessionError
from .spec import ModelSpec


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


class _Block:
    """Rows of one latent block; ``data`` beyond the owner's length is never read."""

    def __init__(self, ledger: Ledger, width: int, dtype: torch.dtype) -> None:
        size = LATENT_BLOCK * width * dtype.itemsize
        ledger.charge(self, size, f"A latent block of {LATENT_BLOCK} tokens")
        self.data = torch.empty(LATENT_BLOCK, width, dtype=dtype)


class Latents:
    """The MLA latents of one layer of one sequence: [length, kv_lora + rope]."""

    def __init__(self, ledger: Ledger, width: int, dtype: torch.dtype) -> None:
        self._ledger, self._width, self._dtype = ledger, width, dtype
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
            self._blocks.append(_Block(self._ledger, self._width, self._dtype))

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

    def block(self, index: int) -> torch.Tensor:
        """Block ``index`` as [256, width]; rows that hold no token yet are zero."""
        data = self._blocks[index].data
        valid = self.length - index * LATENT_BLOCK
        if valid >= LATENT_BLOCK:
            return data
        padded = torch.zeros_like(data)
        padded[:valid] = data[:valid]
        return padded

    def copy(self) -> Latents:
        other = Latents(self._ledger, self._width, self._dtype)
        other._blocks, other.length = self._blocks[: self.blocks], self.length
        if self.length % LATENT_BLOCK:  # the open block is the only one that may still change
            last = _Block(self._ledger, self._width, self._dtype)
            last.data.copy_(other._blocks[-1].data)
            other._blocks[-1] = last
        return other


class SequenceState:
    """State of one sequence after ``position`` tokens, for all layers."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, ledger: Ledger) -> None:
        self.spec, self._dtype, self._ledger = spec, dtype, ledger
        self.position = 0
        self.broken: str | None = None  # why the state cannot be used any more
        kda, mla = spec.kda, spec.mla
        constant = spec.kda_state_bytes(dtype.itemsize) + spec.vocab * 4  # and a row of logits
        ledger.charge(self, constant, "A sequence's KDA state")
        self.kda = {
            layer: torch.zeros(kda.heads, kda.head_dim, kda.head_dim) for layer in spec.kda_layers
        }
        self.conv = {
            layer: torch.zeros(3, kda.conv - 1, kda.width, dtype=dtype) for layer in spec.kda_layers
        }
        self.latents = {layer: Latents(ledger, mla.latent, dtype) for layer in spec.mla_layers}

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

        Raises ``DoesNotFit``, and then holds no more than before.
        """
        try:
            for latents in self.latents.values():
                latents.reserve(count)
        except DoesNotFit:
            for latents in self.latents.values():
                latents.release()
            raise

    def copy(self) -> SequenceState:
        """An independent copy; full latent blocks are shared since they never change."""
        self.usable()
        other = SequenceState(self.spec, self._dtype, self._ledger)
        other.position = self.position
        for layer, matrix in self.kda.items():
            other.kda[layer].copy_(matrix)
            other.conv[layer].copy_(self.conv[layer])
        other.latents = {layer: latents.copy() for layer, latents in self.latents.items()}
        return other

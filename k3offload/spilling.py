"""What an engine keeps in its scratch folder: latents and block summaries without room in RAM."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .config import LATENT_BLOCK
from .kernels.latent_format import LatentFormat
from .kernels.latents_reference import kept
from .latents import Home, HomeOf, Ledger
from .scheduler.plan import Plan
from .spec import ModelSpec
from .tiers.base import Buffer
from .tiers.scratch import Scratch
from .tiers.spill import Spill
from .tiers.spill_files import Layout
from .tiers.spill_room import room_for
from .tiers.tier_disk import DiskTier

ITEM = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.uint8: "packed"}


def as_block(dtype: torch.dtype, width: int) -> Callable[[Buffer], torch.Tensor]:
    """Bytes -> the block [256, width] that they are."""
    return lambda data: torch.from_numpy(data).view(dtype).view(LATENT_BLOCK, width)


class Spilling:
    """The scratch folder in ``place`` (the usual one if None), and the memory that ``plan`` has for
    what goes there: ``latents``, ``summaries``, None where all of them stay in RAM.  ``packed``:
    the precision that latents are kept in, if it is not ``dtype``.

    Raises ``UsageError`` if the folder cannot be used.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        plan: Plan,
        place: Path | None,
        disk: DiskTier,
        warn: Callable[[str], None],
        packed: str | None = None,
    ) -> None:
        self.scratch = Scratch(place, warn)

        def spill(width: int, kind: torch.dtype, size: int, tile: int = 1) -> Spill[torch.Tensor]:
            layout = Layout(width, kind.itemsize, ITEM[kind])
            room = room_for(size, layout.block, tile)
            assert room is not None, (size, layout)
            return Spill(self.scratch, disk, layout, room, as_block(kind, width))

        self.latents = self.summaries = None
        if plan.latents is not None:
            form = LatentFormat(spec.mla.kv_lora, spec.mla.rope, dtype.itemsize, packed)
            self.latents = spill(*kept(form, dtype), plan.latents)
        if plan.summaries is not None:
            assert spec.attnres_block is not None
            tile = -(-len(spec.layers) // spec.attnres_block)
            self.summaries = spill(spec.hidden, dtype, plan.summaries, tile)

    def homes(self, ledger: Ledger) -> HomeOf:
        """Where each layer's state lives."""
        home = Home(torch.device("cpu"), ledger, self.latents)
        return lambda layer: home

    def facts(self) -> dict[str, dict[str, Any]]:
        """What went to disk and came back, by what it was."""
        both = {"latents": self.latents, "block summaries": self.summaries}
        return {what: asdict(one.counts) for what, one in both.items() if one is not None}

    def close(self) -> None:
        """Stop writing and delete the files."""
        with ExitStack() as last:
            last.callback(self.scratch.close)
            for one in (self.latents, self.summaries):
                if one is not None:
                    last.callback(one.close)

"""What an engine keeps in its scratch folder: the latents that have no room in RAM."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .spec import ModelSpec
from .state import Home, HomeOf, Ledger
from .tiers.scratch import Scratch
from .tiers.spill import Spill, room_for
from .tiers.spill_files import Layout
from .tiers.tier_disk import DiskTier

ITEM = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


class Spilling:
    """The scratch folder in ``place`` (the usual one if None) and ``latents`` bytes of RAM for the
    latents that spill.  Raises ``UsageError`` if the folder cannot be used."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        latents: int,
        place: Path | None,
        disk: DiskTier,
        warn: Callable[[str], None],
    ) -> None:
        layout = Layout(spec.mla.latent, dtype.itemsize, ITEM[dtype])
        room = room_for(latents, layout.block)
        assert room is not None, latents
        self.scratch = Scratch(place, warn)
        self.latents = Spill(self.scratch, disk, layout, room)

    def homes(self, ledger: Ledger) -> HomeOf:
        """Where each layer's state lives."""
        home = Home(torch.device("cpu"), ledger, self.latents)
        return lambda layer: home

    def facts(self) -> dict[str, dict[str, Any]]:
        """What went to disk and came back, by what it was."""
        return {"latents": asdict(self.latents.counts)}

    def close(self) -> None:
        """Stop writing and delete the files."""
        with ExitStack() as last:
            last.callback(self.scratch.close)
            last.callback(self.latents.close)

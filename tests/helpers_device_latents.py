"""Engines on a device that has no room for all latents, and one that has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from k3offload.config import LATENT_BLOCK
from k3offload.engine import Engine
from k3offload.errors import DoesNotFit
from k3offload.loading import load
from k3offload.tiers.device_fake import FakeDevice
from k3offload.tiers.device_spill import DeviceSpill
from k3offload.tiers.spill import Spill
from tests.helpers_engine import BRIEF, Logits, checkpoint, least_vram, logits_of, some_tokens

LENGTH = 5 * LATENT_BLOCK + 70
TOKENS = some_tokens(LENGTH)
HOW: dict[str, Any] = {"context": LENGTH + 600, "sessions": 3, "sweep": 512, "threads": 2}
BLOCK = 40_960  #: bytes of a block of these models


def small(extra: int = 0, seed: int = 0, **how: Any) -> Engine:
    """On a device with ``extra`` bytes more than the least; latents leave it however few there
    are."""
    pinnable, watch = how.pop("pinnable", None), how.pop("watch", None)
    how = {**HOW, **how}
    with patch("k3offload.scheduler.plan.WORTH", 0):
        vram = least_vram(checkpoint(**BRIEF), **how) + extra
        device = FakeDevice(vram, seed=seed, pinnable=pinnable)  # so the plan has to keep its word
        return load(checkpoint(**BRIEF), device=device, vram=vram, watch=watch, **how)


def resident(**how: Any) -> Engine:
    """All of them on the device."""
    device = FakeDevice(400 << 20)
    engine = load(checkpoint(**BRIEF), device=device, vram="60M", **HOW, **how)
    assert engine.spilling is None and engine.accelerator is not None
    assert engine.accelerator.latents is None
    return engine


@cache
def everything() -> tuple[Logits, Logits]:
    """There: all rows of the prompt; then the last rows as decode runs."""
    with resident() as engine:
        whole = logits_of(engine, TOKENS)
        return whole, logits_of(engine, TOKENS, decode_from=LENGTH - 6, keep=6)


def least_ram(scratch: Path, **how: Any) -> int:
    """The smallest ``latents`` that is not refused, as the refusal says."""
    with pytest.raises(DoesNotFit, match=r"^1 bytes of latents .*Give --latents") as refusal:
        small(latents=1, scratch=scratch, **how)
    return refusal.value.missing + 1


@contextmanager
def tightly(scratch: Path) -> Iterator[Engine]:
    """The least memory for latents in both places."""
    with small(latents=least_ram(scratch), scratch=scratch) as engine:
        yield engine


def window(engine: Engine) -> DeviceSpill:
    assert engine.accelerator is not None and engine.accelerator.latents is not None
    return engine.accelerator.latents


def spill(engine: Engine) -> Spill[Any]:
    assert engine.spilling is not None and engine.spilling.latents is not None
    return engine.spilling.latents


def moved(engine: Engine, disk: bool = True) -> bool:
    """Whether blocks left the device and came back, and whether they did so over the disk."""
    own, below = window(engine).counts, spill(engine).counts
    there = own.written_bytes > 0 and own.read_bytes > 0
    return there and (below.written_bytes > 0 and below.read_bytes > 0) == disk

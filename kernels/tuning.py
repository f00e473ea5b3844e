"""How Triton's kernels are launched on which GPU: the table ``tuning.json``, by the GPU's name.

Only what changes no bit may stand there: how many steps of a loop are loaded ahead.  Warps and
tiles decide how sums are put together, so they are the same everywhere.  An entry serves every GPU
whose name begins with its key, the longest such key wins, and ``default`` serves all others and
what an entry leaves out.  ``benchmarks/gpu_suite.py --tune`` prints the entry of the GPU it ran on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

import torch


class Tuning(NamedTuple):
    """Steps that are loaded ahead: of decode products, of tiles of prompts, of attention, and
    where attention to prompts expands latents."""

    decode_stages: int
    tile_stages: int
    attend_stages: int
    expand_stages: int


#: What is measured, and may stand in the table: all of it compiles everywhere and fits into shared
#: memory, and nothing that runs for a token spills (`k3offload kernels --candidates`).
CANDIDATES: Final[Mapping[str, tuple[int, ...]]] = {
    "decode_stages": (3, 4, 5), "tile_stages": (2, 3), "attend_stages": (1, 2),
    "expand_stages": (2, 3, 4),
}  # fmt: skip
_tried: list[Tuning] = []


def tuned(where: torch.device) -> Tuning:
    """How kernels are launched at ``where``."""
    if _tried:
        return _tried[-1]
    return _of_gpu(where.index) if where.type == "cuda" else entry_of("")


@contextmanager
def trying(tuning: Tuning) -> Iterator[None]:
    """Launch with ``tuning`` inside the block, whatever the table says."""
    _tried.append(tuning)
    try:
        yield
    finally:
        _tried.pop()


@lru_cache
def _of_gpu(index: int | None) -> Tuning:
    return entry_of(torch.cuda.get_device_name(index))


def entry_of(name: str) -> Tuning:
    """The entry of the table for the GPU ``name``."""
    stored = table()
    fitting = [key for key in stored if key != "default" and name.startswith(key)]
    own = stored[max(fitting, key=len)] if fitting else {}
    return Tuning(**{**stored["default"], **own})


@lru_cache(maxsize=1)
def table() -> dict[str, dict[str, int]]:
    """All entries, by the beginning of a GPU's name."""
    text = Path(__file__).with_name("tuning.json").read_text("utf-8")
    stored: dict[str, dict[str, int]] = json.loads(text)
    return stored

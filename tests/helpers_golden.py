"""The golden cases: which checkpoint each is made of, and what is stored about it.

``tests/golden/NAME.tokens.npy`` is the input, ``NAME.npz`` what ``make_golden.py`` computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import k3offload
from k3offload.make_tiny import make_tiny

GOLDEN: Final = Path(__file__).parent / "golden"
TRAINED: Final = Path(next(iter(k3offload.__path__))) / "nano"  # ships with the package
#: name -> size and options of make_tiny; seed 0
TINY_CASES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "nano-0": ("nano", {}),
    "odd-0": ("odd", {}),
    "nano-probe": ("nano", {"probe_eps": True}),
    "calm-0": ("nano", {"tame": 0.15}),
}
CASES: Final = (*TINY_CASES, "trained")
GREEDY: Final = 16  # tokens of the stored continuation


@dataclass(frozen=True)
class Golden:
    """One stored case: T tokens, V ids, L MoE layers, k experts a token."""

    tokens: NDArray[np.int64]  # [T]
    logits: NDArray[np.float32]  # [T, V]
    greedy: NDArray[np.int64]  # [16], what greedy decoding adds after ``tokens``
    greedy_margin: NDArray[np.float64]  # [16], lead of each over the second-best token
    layers: NDArray[np.int64]  # [L], indices of the MoE layers
    experts: NDArray[np.int64]  # [L, T, k], best score first
    weights: NDArray[np.float64]  # [L, T, k]
    margin: NDArray[np.float64]  # [L, T], score distance to the first expert not chosen


def load_golden(name: str) -> Golden:
    """The stored numbers of case ``name``."""
    with np.load(GOLDEN / f"{name}.npz") as stored:
        held = {key: stored[key] for key in stored.files}
    wide = {"experts": np.int64, "weights": np.float64, "margin": np.float64}
    held.update({key: held[key].astype(kind) for key, kind in wide.items()})
    return Golden(tokens=load_tokens(name), **held)


def load_tokens(name: str) -> NDArray[np.int64]:
    """The input of case ``name``, [T]."""
    tokens: NDArray[np.int64] = np.load(GOLDEN / f"{name}.tokens.npy").astype(np.int64)
    return tokens


def golden_checkpoint(name: str, parent: Path) -> Path:
    """The checkpoint of case ``name``: made under ``parent``, or the one that ships."""
    if name not in TINY_CASES:
        return TRAINED
    size, options = TINY_CASES[name]
    folder = parent / name
    if not folder.exists():
        make_tiny(folder, size, 0, **options)
    return folder

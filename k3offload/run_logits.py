"""The ``logits`` command: float32 logits of a token file, written row by row.

A prompt is fed in sweeps of the wanted size, then (optionally) token by token as decode runs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .engine import Engine
from .errors import UsageError
from .model import Run
from .scheduler.sweep import Tile


def read_tokens(path: Path, vocab: int) -> list[int]:
    """Token ids from a ``.npy`` file, one-dimensional and integer; raises ``UsageError``."""
    try:
        tokens = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} cannot be read as .npy: {error}.", "Save it with numpy."
        ) from error
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer) or not tokens.size:
        raise UsageError(
            f"{path} holds {tokens.dtype} {tokens.shape}.", "Give one row of integer token ids."
        )
    if tokens.min() < 0 or tokens.max() >= vocab:
        raise UsageError(
            f"{path} holds ids from {tokens.min()} to {tokens.max()}; the vocabulary has {vocab}.",
            "Check that the tokens are of this model.",
        )
    return [int(t) for t in tokens]


@dataclass
class Routing:
    """The experts and weights chosen for every token, collected while sweeps run."""

    rows: dict[int, list[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.float32]]]] = field(
        default_factory=dict
    )

    def watch(self, layer: int, tile: Tile, experts: torch.Tensor, weights: torch.Tensor) -> None:
        for part in tile.parts:
            rows = slice(part.at, part.at + part.count)
            self.rows.setdefault(layer, []).append(
                (part.start, experts[rows].numpy().copy(), weights[rows].numpy().copy())
            )

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """``layers`` [n], ``experts`` [n, T, k], ``weights`` [n, T, k], tokens in order."""
        layers = sorted(self.rows)
        ordered = [sorted(self.rows[layer], key=lambda row: row[0]) for layer in layers]
        return {
            "layers": np.array(layers),
            "experts": np.stack([np.concatenate([r[1] for r in rows]) for rows in ordered]),
            "weights": np.stack([np.concatenate([r[2] for r in rows]) for rows in ordered]),
        }


def spans(count: int, sweep: int, decode_from: int | None) -> list[tuple[int, int, bool]]:
    """(first, end, is a decode run) of each sweep over ``count`` tokens."""
    prefill = count if decode_from is None else min(decode_from, count)
    cuts = [(i, min(i + sweep, prefill), False) for i in range(0, prefill, sweep)]
    return cuts + [(i, i + 1, True) for i in range(prefill, count)]


def write_logits(
    engine: Engine,
    tokens: Sequence[int],
    out: Path,
    *,
    sweep: int,
    decode_from: int | None = None,
    last: int | None = None,
) -> None:
    """Write [rows, vocab] float32 to ``out`` as ``.npy``: all tokens, or the ``last`` ones.

    Only the rows that are kept pass the head.  The file appears when it is complete.
    """
    rows = len(tokens) if last is None else min(last, len(tokens))
    first_kept = len(tokens) - rows
    state = engine.new_state()
    partial = out.with_name(f"{out.name}.partial")
    try:
        with partial.open("wb") as file:
            header = {
                "descr": "<f4", "fortran_order": False, "shape": (rows, engine.spec.vocab),
            }  # fmt: skip
            np.lib.format.write_array_header_1_0(file, header)

            def emit(run: int, position: int, row: torch.Tensor) -> None:
                file.write(row.numpy().tobytes())

            for begin, end, decode in spans(len(tokens), sweep, decode_from):
                keep = max(0, end - max(begin, first_kept))
                run = Run(state, tokens[begin:end], keep, decode)
                engine.run([run], emit)
                if run.error is not None:
                    raise run.error
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)

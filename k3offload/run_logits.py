"""The ``logits`` command: float32 logits of a token file, written row by row.

A prompt is fed in sweeps of the wanted size, then (optionally) token by token as decode runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .engine import Engine
from .errors import UsageError
from .find import published
from .model import Run
from .progress import Meter
from .scheduler.sweep import Group
from .spec import ModelSpec


def read_tokens(path: Path, vocab: int) -> list[int]:
    """Token ids from a ``.npy`` file, one-dimensional and integer; raises ``UsageError``."""
    try:
        tokens = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(
            f"{path} cannot be read as .npy: {error}.", "Save it with numpy."
        ) from error
    if not isinstance(tokens, np.ndarray):
        raise UsageError(f"{path} holds several arrays.", "Give one array, .npy.")
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


class Routing:
    """The experts and weights chosen for every token of one sequence, as sweeps run."""

    def __init__(self, spec: ModelSpec, tokens: int) -> None:
        """Room for a sequence of ``tokens`` tokens: ``size`` bytes.

        Raises ``UsageError`` for a model without routed experts.
        """
        shape = _shape(spec, tokens)
        self._rows = {layer: i for i, layer in enumerate(spec.moe_layers)}
        self._experts = np.zeros(shape, np.int32)
        self._weights = np.zeros(shape, np.float32)

    @staticmethod
    def size(spec: ModelSpec, tokens: int) -> int:
        """Bytes that are held for ``tokens`` tokens."""
        layers, count, top_k = _shape(spec, tokens)
        return layers * count * top_k * (4 + 4)

    def watch(
        self,
        layer: int,
        group: Group,
        experts: torch.Tensor,
        weights: torch.Tensor,
        scores: torch.Tensor,
    ) -> None:
        """Takes what the router of ``layer`` chose for a group of rows."""
        for part in group.parts:
            rows, end = group.own(part), part.start + part.count
            self._experts[self._rows[layer], part.start : end] = experts[rows].numpy()
            self._weights[self._rows[layer], part.start : end] = weights[rows].cpu().numpy()

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """``layers`` [n], ``experts`` [n, T, k], ``weights`` [n, T, k], tokens in order."""
        layers = np.array(list(self._rows), np.int64)
        return {"layers": layers, "experts": self._experts, "weights": self._weights}

    def write(self, path: Path) -> None:
        """The arrays as ``.npz``."""
        a = self.arrays()
        with published(path) as file:
            np.savez(file, layers=a["layers"], experts=a["experts"], weights=a["weights"])


def _shape(spec: ModelSpec, tokens: int) -> tuple[int, int, int]:
    if spec.moe is None or not spec.moe_layers:
        raise UsageError("This model has no routed experts.", "Leave out --routing.")
    return len(spec.moe_layers), tokens, spec.moe.top_k


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
    sweep: int | None,
    decode_from: int | None = None,
    last: int | None = None,
    meter: Meter | None = None,
) -> None:
    """Write [rows, vocab] float32 to ``out`` as ``.npy``: all tokens, or the ``last`` ones.

    Only the rows that are kept pass the head.  A ``sweep`` that the plan has no room for becomes
    the largest that it has.  The file appears when it is complete; an ``OSError`` names it.
    """
    rows = len(tokens) if last is None else min(last, len(tokens))
    first_kept = len(tokens) - rows
    if sweep is None or min(sweep, len(tokens)) > engine.plan.sweep_rows:
        sweep = engine.plan.sweep_rows
    state = engine.new_state()
    with published(out) as file:
        header = {
            "descr": "<f4", "fortran_order": False, "shape": (rows, engine.spec.vocab),
        }  # fmt: skip
        np.lib.format.write_array_header_1_0(file, header)

        def emit(run: int, position: int, row: torch.Tensor) -> None:
            file.write(row.numpy().data)

        for begin, end, decode in spans(len(tokens), sweep, decode_from):
            if meter:
                meter.prompt(begin, len(tokens), end - begin)
            run = Run(state, tokens[begin:end], max(0, end - max(begin, first_kept)), decode)
            engine.run([run], emit)
            if run.error is not None:
                raise run.error

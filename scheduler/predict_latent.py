"""latent: a small linear map from a layer's latent to the router scores of layers ahead.

The map is fitted once from recorded routing (``fit``) and read from a file: one projection of
``rank`` numbers for a layer, and from these the codes of each layer ahead.  It needs no router of
a later layer, so it reaches two and more layers ahead for a hundredth of the work.  Without a fit
it guesses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from ..tiers.base import PageId
from .hints import PAYS, Codes, Hints, Kind, Ranked, ranked

Floats = npt.NDArray[np.float32]
DAMPING = 1e-3  #: of the ridge regression, in units of the latent's mean variance
NAMES = ("layers", "down", "up", "bias")


class Predictor(Ranked):
    """The top k of each layer ahead that the fit covers, rank by rank, where that pays."""

    asks_latent = True
    bar = PAYS

    def __init__(
        self, layers: Sequence[int], experts: int, top_k: int, path: str | Path | None = None
    ) -> None:
        super().__init__(layers, experts, top_k)
        self._fit: dict[str, npt.NDArray[Any]] = {} if path is None else read_fit(path)
        if self._fit and (
            tuple(self._fit["layers"]) != self.layers or self._fit["up"].shape[2] != experts
        ):
            raise UsageError(
                f"The fit {path} is of another model: it has {len(self._fit['layers'])} MoE layers "
                f"of {self._fit['up'].shape[2]} experts, this one {len(layers)} of {experts}.",
                "Fit it again from routing of this model.",
            )
        self._place = {layer: i for i, layer in enumerate(self.layers)}

    def rank(self, hints: Hints) -> Iterator[tuple[PageId, Kind]]:
        place = self._place.get(hints.layer)
        if place is None or hints.latent is None or not self._fit:
            return
        down, up, bias = (self._fit[name] for name in NAMES[1:])
        # einsum, unlike a matrix product, wakes no threads that would spin beside the kernels
        small = np.einsum("rz,kz->rk", hints.latent, down[place])
        for ahead, target in enumerate(self.layers[place + 1 : place + 1 + up.shape[1]]):
            codes = np.einsum("rk,ek->re", small, up[place, ahead]) + bias[place, ahead]
            for expert, rank in ranked(np.clip(codes, 0, 255).astype(np.uint8), self.top_k):
                yield PageId(target, expert), (target, rank, ahead)


def fit(
    layers: Sequence[int],
    latent: npt.NDArray[np.floating],
    scores: Codes,
    rank: int = 32,
    reach: int = 2,
) -> dict[str, npt.NDArray[Any]]:
    """Reduced-rank ridge regression of codes on latents, ``reach`` layers ahead.

    ``latent`` [T, L, Z] and ``scores`` [T, L, E] of T tokens of the MoE ``layers``.  Returns
    ``down`` [L, rank, Z], ``up`` [L, reach, E, rank] and ``bias`` [L, reach, E]: the least squares
    map, projected on the ``rank`` directions in which what it predicts varies most.
    """
    tokens, depth, width = latent.shape
    experts, rank = scores.shape[2], min(rank, width)
    down = np.zeros((depth, rank, width), np.float32)
    up = np.zeros((depth, reach, experts, rank), np.float32)
    bias = np.zeros((depth, reach, experts), np.float32)
    for i in range(depth - 1):
        n = min(reach, depth - 1 - i)
        x = latent[:, i].astype(np.float64)
        y = scores[:, i + 1 : i + 1 + n].reshape(tokens, n * experts).astype(np.float64)
        mean_x, mean_y = x.mean(0), y.mean(0)
        x -= mean_x
        gram = x.T @ x
        gram += np.eye(width) * (DAMPING * np.trace(gram) / width + np.finfo(np.float64).tiny)
        weights = np.linalg.solve(gram, x.T @ (y - mean_y))  # [Z, n * E]
        directions = np.linalg.svd(x @ weights, full_matrices=False)[2][:rank]
        kept = len(directions)
        down[i, :kept] = (weights @ directions.T).T
        up[i, :n, :, :kept] = directions.T.reshape(n, experts, kept)
        bias[i, :n] = (mean_y - mean_x @ weights @ directions.T @ directions).reshape(n, experts)
    return {"layers": np.array(layers), "down": down, "up": up, "bias": bias}


def save_fit(path: str | Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write what ``fit`` returned as an npz file."""
    named: dict[str, Any] = {name: arrays[name] for name in NAMES}
    with Path(path).open("wb") as file:
        np.savez(file, **named)


def read_fit(path: str | Path) -> dict[str, npt.NDArray[Any]]:
    """Read it back.  Raises ``UsageError`` when ``path`` holds no fit."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in NAMES}
        (depth,), (_, _, width) = arrays["layers"].shape, arrays["down"].shape
        _, reach, experts, rank = arrays["up"].shape
        shapes = [(depth,), (depth, rank, width), (depth, reach, experts, rank)]
        if [arrays[n].shape for n in NAMES] != [*shapes, (depth, reach, experts)]:
            raise ValueError("its arrays do not belong together")
    except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
        raise UsageError(
            f"{path} is no fit of the latent predictor: {error}.",
            "Make one with scheduler.predict_latent.fit and save_fit.",
        ) from error
    return arrays

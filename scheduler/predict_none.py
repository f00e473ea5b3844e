"""none: never guesses.  Without a predictor every read is a demand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .hints import Guess, Hints


class Predictor:
    """Guesses nothing."""

    asks_router = asks_latent = False

    def __init__(self, layers: Sequence[int], experts: int, top_k: int) -> None:
        pass

    def guess(self, layer: int, hints: Hints) -> list[Guess]:
        return []

    def learn(self, layer: int, experts: npt.NDArray[np.integer[Any]]) -> None:
        pass

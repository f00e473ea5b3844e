"""Router scores in 8 bits, as policies, predictors and traces are told of them.

What they are is ``quantise`` and ``nearest`` of ``scheduler/hints.py``; the native library gives
the same bytes sooner, which between two layers of a decode step is worth having.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from .kernels import native
from .kernels.codes import coded
from .kernels.workers import Workers
from .scheduler.hints import NEAR, Codes, Experts, nearest, quantise


def told(
    scores: npt.NDArray[np.float32],
    top_k: int,
    chosen: Experts | None = None,
    workers: Workers | None = None,
) -> tuple[Experts, Codes]:
    """Of biased ``scores`` [R, E] the best k + ``NEAR`` of each row, experts and codes, those
    ``chosen`` [R, k] int64 before all others.  ``workers``: who helps with many rows."""
    if not native.available():
        return nearest(quantise(scores, top_k), top_k, chosen)
    held = None if chosen is None else torch.from_numpy(chosen)
    best, codes = coded(torch.from_numpy(scores), top_k, NEAR, held, workers)
    return best.astype(np.int64), codes

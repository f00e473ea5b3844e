"""attnres by the native library (native/seq_rows.h): each entry is read twice."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .c_function import CFunction, addresses, dense, dtype_of, narrow, threads_of
from .workers import Workers

_CALL = CFunction("k3_attnres", "piiiqqqfpppp")


def attnres(
    entries: Sequence[torch.Tensor],
    norm: torch.Tensor,
    query: torch.Tensor,
    eps: float,
    workers: Workers | None = None,
) -> torch.Tensor:
    """Mix ``entries`` (each [R, H]; the running sum is last) -> [R, H] in their dtype.

    score_j = sum(entry_j * rsqrt(mean(entry_j^2) + eps) * (norm * query)); the values are the
    raw entries.  All in float32, in the order of the entries.  One entry is returned as it is.
    """
    if len(entries) == 1:
        return entries[0]
    entries, norm, query = [dense(e) for e in entries], narrow(norm), narrow(query)
    rows, width = entries[0].shape
    assert all(e.shape == (rows, width) and e.dtype == entries[0].dtype for e in entries)
    out = torch.empty_like(entries[0])
    _CALL(
        threads_of(workers), dtype_of(out), dtype_of(norm), dtype_of(query), len(entries), rows,
        width, eps, addresses(entries), norm, query, out, also=entries,
    )  # fmt: skip
    return out

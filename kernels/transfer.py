"""Small tensors between the host and where kernels run, with as few waits as there can be.

What goes to a GPU passes through locked memory of torch's own cache, which gives a block away
again only once the copies from it have passed: so nobody waits, and nothing is overwritten.  What
comes back has to be waited for, and costs more than its bytes: all that was launched before has to
end first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

TABLES = 512  #: of addresses that are kept: attention residuals and latents of many layers


def sent(tensor: torch.Tensor, where: torch.device) -> torch.Tensor:
    """``tensor`` in RAM at ``where``, for kernels that are called from now on."""
    if where.type == "cpu":
        return tensor
    return tensor.pin_memory().to(where, non_blocking=True)


def fetched(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``tensors``, on one device or in RAM, in RAM; one wait for all of them."""
    found, streams = [], set()
    for tensor in tensors:
        if tensor.is_cpu:
            found.append(tensor)
            continue
        here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        found.append(here.copy_(tensor, non_blocking=True))
        streams.add(torch.cuda.current_stream(tensor.device))
    for stream in streams:
        stream.synchronize()
    return found


def tables(pieces: Sequence[torch.Tensor], where: torch.device) -> torch.Tensor:
    """Addresses of ``pieces`` as int64 at ``where``: what a kernel walks through.  Not to be
    written to: the same addresses are sent once."""
    return _table(tuple(piece.data_ptr() for piece in pieces), where)


@lru_cache(maxsize=TABLES)
def _table(addresses: tuple[int, ...], where: torch.device) -> torch.Tensor:
    return sent(torch.tensor(addresses, dtype=torch.int64), where)

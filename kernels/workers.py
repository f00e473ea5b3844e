"""Threads for arithmetic that never change a bit.

Every torch operator runs on one thread and on a fixed shape; the workers only decide which
tiles run at the same time.  So the thread count cannot reach a result: not through a split of a
reduction, and not through the scalar tail that vectorised operators use at the end of a range.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

import torch


def _one_thread() -> None:
    torch.set_num_threads(1)


@contextmanager
def single_threaded() -> Iterator[None]:
    """Run torch operators of the calling thread on one thread; restores the caller's setting."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Workers:
    """``threads`` threads (the caller is one of them) that share out numbered tasks."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = (
            ThreadPoolExecutor(threads - 1, "k3-compute", initializer=_one_thread)
            if threads > 1
            else None
        )
        self._scratch = threading.local()

    def map(self, task: Callable[[int], None], count: int) -> None:
        """Call ``task(i)`` for each ``i < count``, in any order; raises the first error."""
        if self._pool is None or count <= 1:
            for i in range(count):
                task(i)
            return
        numbers = itertools.count()  # next() is atomic
        inference = torch.is_inference_mode_enabled()  # a thread's own, and tensors remember it

        def drain() -> None:
            with torch.inference_mode(inference):
                while (i := next(numbers)) < count:
                    task(i)

        helpers = [self._pool.submit(drain) for _ in range(min(self.threads, count) - 1)]
        try:
            drain()
        finally:
            next_error = [f.exception() for f in wait(helpers).done]
        for error in next_error:
            if error is not None:
                raise error

    def scratch(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """This thread's buffer ``name``, grown on demand: contents are whatever was there."""
        size = 1
        for n in shape:
            size *= n
        key = f"{name}/{dtype}"
        flat: torch.Tensor | None = getattr(self._scratch, key, None)
        if flat is None or flat.numel() < size:
            flat = torch.empty(size, dtype=dtype)
            setattr(self._scratch, key, flat)
        return flat[:size].view(shape)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

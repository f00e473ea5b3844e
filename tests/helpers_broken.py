"""Model files of which a part cannot be read, or reads as something else: ``os.preadv``, watched.

Files, tiers and engines are real; pauses between tries take no time.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from k3offload.checkpoint import Checkpoint
from k3offload.engine import Engine
from k3offload.tiers.base import Location, PageId


class Broken:
    """Reads that touch a page which was ``lose``d fail; those of one that was ``spoil``ed give
    bytes of 255; with ``gone`` all reads of model files fail, once so many more have been made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._preadv = os.preadv
        self._lost: list[tuple[str, int, int]] = []
        self._spoiled: list[tuple[str, int, int]] = []
        self.gone: int | None = None
        self.failed = 0  #: reads that did
        monkeypatch.setattr(os, "preadv", self)
        monkeypatch.setattr(time, "sleep", lambda seconds: None)

    def lose(self, checkpoint: Checkpoint, page: PageId) -> None:
        self._lost += _places(checkpoint, page)

    def lose_at(self, checkpoint: Checkpoint, place: Location) -> None:
        file = os.path.realpath(checkpoint.files[place.file])
        self._lost.append((file, place.offset, place.offset + place.length))

    def spoil(self, checkpoint: Checkpoint, page: PageId) -> None:
        self._spoiled += _places(checkpoint, page)

    def mend(self) -> None:
        self._lost, self._spoiled, self.gone = [], [], None

    def __call__(self, fd: int, views: Sequence[Any], offset: int) -> int:
        path = os.readlink(f"/proc/self/fd/{fd}")
        end = offset + len(views[0])
        if self.gone is not None and path.endswith(".safetensors"):
            self.gone -= 1
            if self.gone < 0:
                self.failed += 1
                raise OSError(errno.ENODEV, "No such device")
        if any(file == path and begin < end and offset < stop for file, begin, stop in self._lost):
            self.failed += 1
            raise OSError(errno.EIO, "Input/output error")
        got = self._preadv(fd, views, offset)
        bytes_read = np.frombuffer(views[0], np.uint8)
        for file, begin, stop in self._spoiled:
            if file == path:
                bytes_read[max(0, begin - offset) : max(0, stop - offset)] = 255
        return got


def _places(checkpoint: Checkpoint, page: PageId) -> list[tuple[str, int, int]]:
    """The inside of the extents of ``page``: their aligned windows reach into other pages."""
    return [
        (os.path.realpath(checkpoint.files[e.file]), e.offset + 4096, e.offset + e.length - 4096)
        for e in checkpoint.expert(*page).extents
    ]


def pages_of(engine: Engine, text: str, count: int) -> set[PageId]:
    """The experts that ``text`` and ``count`` greedy tokens after it ask for, alone."""
    asked: set[PageId] = set()

    def on_route(layer: int, group: Any, experts: Any, weights: Any, scores: Any) -> None:
        asked.update(PageId(layer, int(e)) for e in experts.view(-1))

    before, engine.hooks.on_route = engine.hooks.on_route, on_route
    try:
        list(engine.batch([text], max_new_tokens=count))
    finally:
        engine.hooks.on_route = before
    return asked

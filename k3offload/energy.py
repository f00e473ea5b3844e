"""Joules that a stretch of work took, from the counters that the machine lets us read.

The kernel's powercap files (RAPL) count processor packages and memory, NVIDIA's library counts each
GPU.  Both count the whole package or card, whoever used it.  What cannot be read has a reason.
Counters of a processor begin again, after a quarter of an hour of hard work, so they are read all
the while.
"""

from __future__ import annotations

import ctypes
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

POWERCAP: Final = Path("/sys/class/powercap")
CPU, GPU = "cpu", "gpu"
EVERY = 20.0  #: seconds between two looks at a counter: no package takes 3 kW
_COUNTED: Final = ("package", "dram")  #: zones that do not hold one another


class _Zone(NamedTuple):
    """A counter of microjoules that begins again at ``span``."""

    file: Path
    span: int

    def read(self) -> int:
        return int(self.file.read_text())


@dataclass(frozen=True)
class Energy:
    """``joules`` by source; ``missing``: why the others cannot be told."""

    joules: dict[str, float]
    missing: tuple[str, ...]


class Meter:
    """Counts from its making on, until it is closed.  ``gpu``: the UUID of the card in use, None
    without one."""

    def __init__(self, gpu: str | None = None, root: Path | None = None) -> None:
        self._missing: list[str] = []
        self._zones, self._last = self._opened(root or POWERCAP)
        self._used, self._lock = [0] * len(self._zones), threading.Lock()
        self._closed = threading.Event()
        self._card = None if gpu is None else _card(gpu)
        if isinstance(self._card, str):
            self._missing.append(self._card)
        self._card_begin = self._card.read() if isinstance(self._card, _Card) else None
        if self._zones:
            threading.Thread(target=self._watch, name="k3-energy", daemon=True).start()

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Look at no counter any more."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(EVERY):
            try:
                self._count()
            except (OSError, ValueError):
                return  # ``read`` will meet it too

    def _count(self) -> None:
        """Add what was used since the last time."""
        with self._lock:
            for i, zone in enumerate(self._zones):
                now = zone.read()
                self._used[i] += (now - self._last[i]) % (zone.span + 1)
                self._last[i] = now

    def _opened(self, root: Path) -> tuple[list[_Zone], list[int]]:
        zones, begin = [], []
        refused = ""
        for folder in sorted(root.glob("intel-rapl:*")):  # the name on AMD's processors too
            try:
                name = (folder / "name").read_text().strip()
                if not name.startswith(_COUNTED):
                    continue
                span = int((folder / "max_energy_range_uj").read_text())
                zone = _Zone(folder / "energy_uj", span)
                begin.append(zone.read())
                zones.append(zone)
            except (OSError, ValueError) as error:
                refused = f"{error.__class__.__name__}: {error}"
        if refused:
            self._missing.append(f"energy of the processor: {refused}")
            return [], []
        if not zones:
            self._missing.append(f"energy of the processor: {root} has no counter of a package")
        return zones, begin

    def read(self) -> Energy:
        """What was used since the meter was made."""
        joules = {}
        if self._zones:
            self._count()
            joules[CPU] = sum(self._used) / 1e6
        if isinstance(self._card, _Card) and self._card_begin is not None:
            now = self._card.read()
            if now is not None:
                joules[GPU] = (now - self._card_begin) / 1e3
        missing = list(self._missing)
        if isinstance(self._card, _Card) and GPU not in joules:
            missing.append("energy of the GPU: this card does not count it")
        return Energy(joules, tuple(missing))


class _Card:
    """A GPU's counter of millijoules."""

    def __init__(self, library: Any, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle

    def read(self) -> int | None:
        count = ctypes.c_ulonglong()
        failed = self._library.nvmlDeviceGetTotalEnergyConsumption(
            self._handle, ctypes.byref(count)
        )
        return None if failed else int(count.value)


def _card(uuid: str) -> _Card | str:
    """The card, or why it cannot be read."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2():
            return "energy of the GPU: NVIDIA's library does not start"
        handle = ctypes.c_void_p()
        name = (uuid if uuid.startswith("GPU-") else f"GPU-{uuid}").encode()
        if library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)):
            return f"energy of the GPU: NVIDIA's library does not know {os.fsdecode(name)}"
    except (OSError, AttributeError) as error:
        return f"energy of the GPU: {error}"
    return _Card(library, handle)

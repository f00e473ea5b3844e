"""What a tier was asked for: one rule for every kind of page."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass
class Counts:
    """What a tier was asked for: hits + late + misses = requests.

    Late is a page joined while it was loading, for another lease or as a prefetch.  ``bytes`` are
    page sizes of the reads started, prefetches included; of a cancelled read only what had landed.
    Prefetches end as ``useful`` (asked for, in time or late) or ``wasted`` (evicted, cancelled or
    failed before that); the others still wait.
    """

    requests: int = 0
    hits: int = 0
    late: int = 0
    misses: int = 0
    bytes: int = 0
    wait_seconds: float = 0.0
    prefetches: int = 0
    useful: int = 0
    wasted: int = 0
    prefetch_bytes: int = 0

    def copy(self) -> Counts:
        return replace(self)

"""What a machine reaches, in units a second: measured, given, or assumed.

Numbers only; ``measure.py`` fills them in, ``forecast.py`` uses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

FORMATS: Final = ("bfloat16", "int8", "mxfp4")  #: of a weight of the trunk in memory
EXPERTS: Final = "experts"  #: routed experts have rates of their own, whatever their format
KINDS: Final = (*FORMATS, EXPERTS)

#: What is assumed of a machine nobody measured: one PCIe 4 drive, two channels of DDR5, a desktop
#: processor with 512-bit vectors.
ASSUMED_DISK: Final = 7e9
ASSUMED_RAM: Final = 60e9
ASSUMED_MACS: Final = 500e9
#: Parts of those that our kernels are assumed to reach; measured rates need none of them.
READ_SHARE: Final = 0.7  #: of the memory's read bandwidth, by weights of a decode row
FLOAT32_SHARE: Final = 0.25  #: of the multiply-adds in bfloat16
RECURRENCE_SHARE: Final = 0.05
BYTES_PER_NUMBER: Final = 24  #: of memory traffic that a number of row-wise work costs
ASSUMED_LAYER: Final = 1e-3  #: seconds of calls and hand-overs
ASSUMED_TILE: Final = 16  #: rows of a tile of bfloat16 products; others go row by row


@dataclass(frozen=True)
class Rates:
    """What a machine reaches with our own kernels, per second, all threads together."""

    disk: float  #: bytes of pages read
    ram: float  #: bytes of memory read by a plain scan
    stream: Mapping[str, float]  #: bytes of weights a decode row reads, by format
    extra: Mapping[str, float]  #: multiply-adds of each further decode row, by format
    ready: Mapping[str, float]  #: bytes of weights made ready for prompt rows, by format
    macs: Mapping[str, float]  #: multiply-adds of prompt rows after that, by format
    tile: float  #: rows that experts compute at a time in prompts: one row costs as much as these
    macs32: float  #: multiply-adds of float32 products: further rows of the head, decode attention
    attention: float  #: multiply-adds of prompt attention, its keys and values expanded
    recurrence: float  #: multiply-adds of the chunked KDA recurrence, its convolutions and gates
    numbers: float  #: numbers through row-wise operators
    layer: float  #: seconds that a layer costs beside all that
    chunk: float  #: seconds that a chunk of prompt rows costs in a layer beside all that
    source: str = "assumed"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def assumed(
    disk: float | None = None,
    ram: float | None = None,
    macs: float | None = None,
    dtype: str = "bfloat16",
) -> Rates:
    """Rates from three headline figures in units a second: bytes read from disk, bytes read from
    memory, multiply-adds of large bfloat16 products.  None takes the assumption."""
    given = disk or ram or macs
    disk, ram, macs = disk or ASSUMED_DISK, ram or ASSUMED_RAM, macs or ASSUMED_MACS
    macs32 = macs * FLOAT32_SHARE
    products = macs if dtype == "bfloat16" else macs32
    return Rates(
        disk=disk,
        ram=ram,
        stream=dict.fromkeys(KINDS, ram * READ_SHARE),
        extra=dict.fromkeys(KINDS, macs32),
        ready=dict.fromkeys(KINDS, ram * READ_SHARE),
        macs=dict.fromkeys(KINDS, products),
        tile=ASSUMED_TILE if dtype == "bfloat16" else 1,
        macs32=macs32,
        attention=macs32,
        recurrence=macs * RECURRENCE_SHARE,
        numbers=ram / BYTES_PER_NUMBER,
        layer=ASSUMED_LAYER,
        chunk=ASSUMED_LAYER,
        source="given, the rest assumed" if given else "assumed",
    )


def scaled(rates: Rates, *, disk: float = 1.0, ram: float = 1.0, macs: float = 1.0) -> Rates:
    """``rates`` of a machine whose disk, memory or arithmetic is so many times faster."""

    def times(table: Mapping[str, float], factor: float) -> dict[str, float]:
        return {name: rate * factor for name, rate in table.items()}

    return replace(
        rates,
        disk=rates.disk * disk,
        ram=rates.ram * ram,
        stream=times(rates.stream, ram),
        ready=times(rates.ready, ram),
        numbers=rates.numbers * ram,
        extra=times(rates.extra, macs),
        macs=times(rates.macs, macs),
        macs32=rates.macs32 * macs,
        attention=rates.attention * macs,
        recurrence=rates.recurrence * macs,
    )

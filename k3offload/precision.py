"""Which weights of the trunk a smaller precision touches, and what each of them becomes.

This is the one place of that rule: names, shapes and bytes.  How numbers are rounded is
``kernels/quantize.py``; nothing here reads a file.

Quantised are the large matrices that every token passes.  Left as they are: the embedding (its rows
are looked up), the router, whose near-ties decide which experts run, ``kv_b_proj`` (attention uses
its rows in another way than a product), ``b_proj`` and the two-step projections of KDA's decay and
gate (tiny, and they drive a recurrence), convolutions, norms and vectors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from .errors import UsageError
from .inventory import DTYPE_BITS, MXFP4_GROUP

PRECISIONS: Final = ("bfloat16", "int8", "mxfp4")
INT8_GROUP: Final = 64  #: input columns that share one scale
GROUP: Final = {"int8": INT8_GROUP, "mxfp4": MXFP4_GROUP}
CODES: Final = {"int8": "_int8", "mxfp4": "_packed"}  #: what the codes' name ends with
SCALE: Final = "_scale"

_MATRICES: Final = frozenset({
    "q_proj", "k_proj", "v_proj", "o_proj", "g_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa",
    "gate_proj", "up_proj", "down_proj", "routed_expert_down_proj", "routed_expert_up_proj",
    "lm_head",
})  # fmt: skip


class Part(NamedTuple):
    """One array that a tensor is held as: its name, safetensors dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


def quantised(name: str, shape: Sequence[int], precision: str) -> bool:
    """Whether the trunk tensor ``name`` (local or full) of ``shape`` is quantised."""
    if precision not in GROUP or len(shape) != 2 or not name.endswith(".weight"):
        return False
    return name.split(".")[-2] in _MATRICES and shape[1] % GROUP[precision] == 0


def parts(name: str, dtype: str, shape: Sequence[int], precision: str) -> tuple[Part, ...]:
    """What the tensor ``name`` is held as under ``precision``: itself, or codes and scales."""
    if not quantised(name, shape, precision):
        return (Part(name, dtype, tuple(shape)),)
    n, k = shape
    groups = (n, k // GROUP[precision])
    if precision == "int8":
        return (Part(name + "_int8", "I8", (n, k)), Part(name + SCALE, "BF16", groups))
    return (Part(name + "_packed", "U8", (n, k // 2)), Part(name + SCALE, "U8", groups))


def stored_bytes(shape: Sequence[int], precision: str) -> int:
    """Bytes of a quantisable matrix [N, K] under ``precision``."""
    return sum(p.nbytes for p in parts("lm_head.weight", "BF16", shape, precision))


def stored_precision(names: Iterable[str]) -> str:
    """The precision that the trunk tensors ``names`` of a model folder are stored in."""
    for name in names:
        for precision, ending in CODES.items():
            if name.endswith(".weight" + ending) and ".experts." not in name:
                return precision
    return "bfloat16"


def choose_precision(wanted: str | None, stored: str) -> str:
    """The precision to run with: what the folder has unless told otherwise.

    Raises ``UsageError`` for an unknown one, or where a quantised trunk would have to become
    another."""
    if wanted is not None and wanted not in PRECISIONS:
        raise UsageError(
            f"The trunk precision {wanted!r} is not known.", f"Use one of {', '.join(PRECISIONS)}."
        )
    if wanted is None or wanted == stored:
        return stored
    if stored != "bfloat16":
        raise UsageError(
            f"The trunk of this model is packed in {stored}; it cannot be run in {wanted}.",
            "Leave --trunk out, or give the model that the pack was made from.",
        )
    return wanted

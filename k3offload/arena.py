"""A layer's tensors in one piece of memory, and how they are taken from there by name.

Where they lie is ``layout.py``.  Nothing here reads a file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from .checkpoint import Tensor, check_trunk_values
from .errors import CheckpointError
from .kernels.int8 import Int8Weight
from .kernels.linear_reference import Bundle, DenseWeight, Weight
from .kernels.mxfp4 import SCALE_NAN, Mxfp4Weight
from .layout import lay_out
from .precision import CODES, SCALE
from .spec import ModelSpec
from .tiers.base import Buffer

Made = TypeVar("Made")
Memory = Buffer | torch.Tensor  #: bytes in RAM, or of a device

DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I8": torch.int8,
    "U8": torch.uint8,
}  # fmt: skip


def as_bytes(memory: Memory) -> torch.Tensor:
    """``memory`` as a tensor of bytes, the same memory."""
    return memory if isinstance(memory, torch.Tensor) else torch.from_numpy(memory)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of ``tensor``, which has no gaps, the same memory."""
    return tensor.view(-1).view(torch.uint8)


def view(memory: Memory, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """The tensor that the bytes ``memory`` are."""
    return as_bytes(memory).view(DTYPES[dtype]).view(*shape)


class LayerWeights:
    """Named tensors of one layer (or of the model as a whole: ``layer == -1``) in ``arena``."""

    def __init__(
        self, layer: int, tensors: Sequence[Tensor], precision: str, arena: Memory, spec: ModelSpec
    ) -> None:
        self.layer, self.precision, self.arena = layer, precision, arena
        self.items, self.size = lay_out(tensors, precision)
        assert len(arena) >= self.size, (layer, len(arena), self.size)
        self._spec, self._source = spec, tensors
        self._tensors = {
            part.name: view(arena[at : at + part.nbytes], part.dtype, part.shape)
            for item in self.items
            for part, at in zip(item.parts, item.at, strict=True)
        }
        self._matrices: dict[str, Weight] = {}
        self._vectors: dict[str, torch.Tensor] = {}
        self._bundles: dict[tuple[str, ...], Bundle] = {}
        self._kept: Any = None

    def laid_in(self, arena: Memory) -> LayerWeights:
        """The same layer in other memory, which holds nothing of it yet."""
        return LayerWeights(self.layer, self._source, self.precision, arena, self._spec)

    @property
    def read_bytes(self) -> int:
        """What has to be read to fill the arena."""
        return sum(item.tensor.location.length for item in self.items)

    def arrays(self) -> list[tuple[str, torch.Tensor]]:
        """All arrays with the names they are held under."""
        return list(self._tensors.items())

    def tensor(self, name: str) -> torch.Tensor:
        """An array by the name it is held under."""
        return self._tensors[name]

    def matrix(self, name: str) -> Weight:
        """``name`` [N, K] for ``linear``: the same object every time, for kernels that remember
        where a weight lies."""
        weight = self._matrices.get(name)
        if weight is None:
            weight = self._matrices[name] = self.rows(name, 0, None)
        return weight

    def bundle(self, *names: str) -> Bundle:
        """The matrices ``names``, for ``linears``: the same object every time."""
        bundle = self._bundles.get(names)
        if bundle is None:
            bundle = self._bundles[names] = Bundle([self.matrix(name) for name in names])
        return bundle

    def rows(self, name: str, begin: int, end: int | None) -> Weight:
        """Rows ``begin:end`` of a matrix, as a weight of their own."""
        some, have = slice(begin, end), self._tensors
        if name in have:
            return DenseWeight(have[name][some])
        scale = have[name + SCALE][some]
        if name + CODES["int8"] in have:
            return Int8Weight(have[name + CODES["int8"]][some], scale)
        return Mxfp4Weight(have[name + CODES["mxfp4"]][some], scale)

    def vector(self, name: str) -> torch.Tensor:
        """``name`` flattened, as stored."""
        vector = self._vectors.get(name)
        if vector is None:
            vector = self._vectors[name] = self._tensors[name].reshape(-1)
        return vector

    def conv(self, name: str) -> torch.Tensor:
        """A depthwise convolution, stored [C, 1, taps] or [C, taps] -> [C, taps] float32."""
        return self._tensors[name].reshape(-1, self._spec.kda.conv).float()

    def kept(self, make: Callable[[], Made]) -> Made:
        """What ``make`` gave at the first call: what a layer's code derives from its weights.  It
        must see no more than views of them and a few small copies."""
        if self._kept is None:
            self._kept = make()
        made: Made = self._kept
        return made

    def check_values(self) -> None:
        """Refuse what no sound file holds: a used tail of ``A_log``, scales that are no numbers."""
        for item in self.items:
            name = item.tensor.name
            if name == "self_attn.A_log":
                values = self.vector(name).float().numpy()
                check_trunk_values(self.full_name(name), values, self._spec.kda.heads)
            elif name.endswith(SCALE):
                self._check_scale(name)

    def _check_scale(self, name: str) -> None:
        scale = self._tensors[name]
        if scale.dtype == torch.uint8:
            bad = holds_nan(scale.numpy())
        else:
            bad = not bool(torch.isfinite(scale).all())
        if bad:
            raise CheckpointError(
                f"The tensor {self.full_name(name)} holds a scale that is not a number.",
                "The file is damaged: run k3offload check MODEL --full and fetch it again.",
            )

    def full_name(self, name: str) -> str:
        return name if self.layer < 0 else f"layers.{self.layer}.{name}"


def holds_nan(scale: Buffer) -> bool:
    """Whether one of these MXFP4 scale bytes is NaN; 255 is also the largest byte there is."""
    return int(np.max(scale)) == SCALE_NAN

"""Weights of every format for the native kernels, where they lie, and memory with a hard end."""

from __future__ import annotations

import torch

from k3offload.kernels.int8 import Int8Weight
from k3offload.kernels.int8 import decode as decode_int8
from k3offload.kernels.linear_reference import DenseWeight, Weight
from k3offload.kernels.mxfp4 import Mxfp4Weight
from k3offload.kernels.mxfp4 import decode as decode_mxfp4


def draw(kind: str, n: int, k: int, seed: int = 0) -> Weight:
    """A seeded weight [n, k] of ``kind``: mxfp4, int8 or the name of a dtype."""
    g = torch.Generator().manual_seed(seed)
    if kind == "mxfp4":
        packed = torch.randint(0, 256, (n, k // 2), generator=g, dtype=torch.uint8)
        return Mxfp4Weight(packed, torch.randint(116, 124, (n, k // 32), generator=g).byte())
    if kind == "int8":
        q = torch.randint(-127, 128, (n, k), generator=g, dtype=torch.int8)
        return Int8Weight(q, (torch.rand(n, k // 64, generator=g) / 300).bfloat16())
    return DenseWeight((torch.randn(n, k, generator=g) / 4).to(getattr(torch, kind)))


def exact(weight: Weight) -> torch.Tensor:
    """[N, K] float64 by the format's definition."""
    if isinstance(weight, Mxfp4Weight):
        return decode_mxfp4(weight.packed, weight.scale).double()  # exact in bfloat16
    if isinstance(weight, Int8Weight):
        return decode_int8(weight.q, weight.scale).double()
    assert isinstance(weight, DenseWeight)
    return weight.tensor.double()


def moved(tensor: torch.Tensor, shift: int) -> torch.Tensor:
    """The same numbers ``shift`` elements behind the beginning of a block of memory."""
    memory = torch.zeros(tensor.numel() + shift, dtype=tensor.dtype)
    return memory[shift:].view(tensor.shape).copy_(tensor)


def moved_weight(weight: Weight, shift: int) -> Weight:
    if isinstance(weight, Mxfp4Weight):
        return Mxfp4Weight(moved(weight.packed, shift), moved(weight.scale, shift))
    if isinstance(weight, Int8Weight):
        return Int8Weight(moved(weight.q, shift), moved(weight.scale, shift))
    assert isinstance(weight, DenseWeight)
    return DenseWeight(moved(weight.tensor, shift), aligned=False)


#: A program: every product, and attention of prompts, with operands that end at a page nobody may
#: read; of attention what it asks for itself, too.  Then shows that reading on would have been a
#: crash.
GUARDED = """
import ctypes, mmap, os, torch
from k3offload.kernels import native
from k3offload.kernels.experts_native import experts
from k3offload.kernels.experts_reference import Job
from k3offload.kernels.glu_reference import Activation
from k3offload.kernels.int8 import Int8Weight
from k3offload.kernels.linear_native import linear
from k3offload.kernels.linear_reference import DenseWeight
from k3offload.kernels.mla_prefill_native import mla_prefill
from k3offload.kernels.mla_prefill_reference import Query
from k3offload.kernels.mxfp4 import Mxfp4Weight
from k3offload.kernels.workers import Workers
from tests.helpers_native import draw

libc, kept = ctypes.CDLL(None), []

def last(tensor):
    size = tensor.numel() * tensor.element_size()
    room = -(-size // 4096) * 4096
    memory = mmap.mmap(-1, room + 4096)
    kept.append(memory)
    at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(ctypes.c_void_p(at + room), 4096, 0) == 0
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=room - size)
    return flat.view(tensor.shape).copy_(tensor)

def at_the_end(w):
    if isinstance(w, Mxfp4Weight):
        return Mxfp4Weight(last(w.packed), last(w.scale))
    if isinstance(w, Int8Weight):
        return Int8Weight(last(w.q), last(w.scale))
    return DenseWeight(last(w.tensor))

solo = Workers(1)
for isa in native.isas():
    native.use(isa)
    for kind, k in [("mxfp4", 32), ("mxfp4", 160), ("mxfp4", 544), ("int8", 64), ("int8", 192),
                    ("bfloat16", 25), ("bfloat16", 88), ("float32", 25), ("float16", 41)]:
        w = at_the_end(draw(kind, 33, k))
        for dtype in (torch.float32, torch.bfloat16):
            for rows in (1, 17):
                x = last(torch.randn(rows, k).to(dtype))
                for decode in (True, False):
                    linear(x, w, solo, decode)
                    if kind in ("mxfp4", "int8"):
                        down = at_the_end(draw(kind, 5, 64))
                        gate = at_the_end(draw(kind, 64, k))
                        experts(x, [Job(gate, gate, down)], Activation("silu"), solo, decode)
    made = torch.empty
    for heads, nope, rope, v, rank in [(1, 1, 1, 1, 1), (3, 33, 31, 47, 95), (2, 64, 0, 32, 32),
                                       (2, 128, 64, 128, 512)]:
        size = lambda *shape: last(torch.randn(shape).bfloat16())
        up = DenseWeight(size(heads * (nope + v), rank))
        blocks = [size(256, rank + rope) for _ in range(2)]
        queries = [Query(size(end - at, heads, nope + rope), at)
                   for at, end in [(0, 64), (100, 101), (230, 290), (475, 512)]]
        for pieces in ([blocks], [[block] for block in blocks]):
            torch.empty = lambda *shape: last(made(*shape))
            mla_prefill(queries, pieces, 512, up, nope, v, 0.1, solo)
            torch.empty = made
end = last(torch.zeros(4096, dtype=torch.uint8))
child = os.fork()
if child == 0:
    ctypes.string_at(end.data_ptr(), 4097)
    os._exit(0)
assert os.waitpid(child, 0)[1] != 0
print("segfault seen")
"""

"""Memory that operators take beside their results, by what computes them.

The torch kernels keep decoded tiles of weights and float32 copies; the native ones keep packed
activations and intermediates in buffers that stay (``kernels/native/linear_rows.cpp`` and
``linear_tiles.cpp`` say how they are cut).
"""

from __future__ import annotations

from typing import NamedTuple

from .config import (
    CALL_ROWS,
    EXPANDED,
    GROUP_ROWS,
    HEAD_GROUP,
    KDA_CHUNK,
    LATENT_BLOCK,
    RANGES,
    ROW_TILE,
    SUB_BLOCK,
    align_up,
    tile_rows,
)
from .spec import ModelSpec, TensorSpec

KERNEL_CODE = 350_000  #: bytes the matrix library keeps for each shape of a bfloat16 product,
#: and as much again for large ones
ITEM = {"bfloat16": 2, "float32": 4}
X_ROWS = 32  #: rows that the native row kernels widen at a time
PANEL_ROWS = 16  #: rows of a tile
ROWS_BYTES = 16 << 20  #: intermediates of the native row kernels at a time
CALL_JOBS = 16  #: experts of one call: as many as a lease hands out at once
PACKED_LATENTS = 2 << 20  #: latents that tiles attend to at a time, PACKED in C++
THREAD_BYTES = 7 << 19  #: results and packed weights of a native thread


class Backend(NamedTuple):
    """Which kernels compute: native ones, their tiles of bfloat16 for rows of prompts (by the
    matrix unit or without one), torch ones, and whether tiles also attend with those rows."""

    native: bool = True
    tiles: bool = False
    torch: bool = False
    attends: bool = False


def thread_bytes(spec: ModelSpec, dtype: str, threads: int, backend: Backend) -> int:
    """Scratch of the compute threads and code that the matrix library makes for each shape."""
    in_tiles = backend.attends and dtype == "bfloat16"
    total = _attend_bytes(spec, threads, backend, in_tiles)
    if backend.native:
        up = HEAD_GROUP * (spec.mla.nope + spec.mla.v) * spec.mla.kv_lora
        code = KERNEL_CODE * (1 + min(1, up / 2**19)) if dtype == "bfloat16" and not in_tiles else 0
        total += threads * THREAD_BYTES + int(code)
    if backend.torch:
        total += _torch_tiles(spec, dtype, threads)
    return total


def _torch_tiles(spec: ModelSpec, dtype: str, threads: int) -> int:
    coded, tiles, narrow, wide = 0, 1, {(0, 0)}, {(0, 0)}
    for tensor in [*spec.global_tensors(), *_one_of_each(spec)]:
        if len(tensor.shape) != 2 or tensor.shape[0] == 1:
            continue
        packed = "packed" in tensor.name
        n, k = tensor.shape[0], tensor.shape[1] * (2 if packed else 1)
        step = tile_rows(n, k)
        tiles = max(tiles, -(-n // step))
        always_float32 = tensor.name.endswith((".gate.weight", "lm_head.weight"))
        shapes = wide if always_float32 or dtype == "float32" else narrow
        shapes |= {(step, k), (n % step, k)}
        if packed:
            coded = max(coded, int(step * k * (0.5 + 1 + 2)))  # packed, index, bfloat16
        elif ".experts." in tensor.name:
            coded = max(coded, step * k * ITEM[dtype])  # copied to an aligned place
    float_tile = max(n * k for n, k in wide) * 4
    code = sum(KERNEL_CODE * (1 + min(1, n * k / 2**19)) for n, k in narrow if n)
    return min(threads, tiles) * (float_tile + coded) + int(code)


def _attend_bytes(spec: ModelSpec, threads: int, backend: Backend, in_tiles: bool) -> int:
    """What the compute threads hold while each attends with a group of heads: by torch in float32,
    or in tiles of bfloat16 (native/mla_tiles.cpp)."""
    m, kda = spec.mla, spec.kda
    groups = -(-m.heads // HEAD_GROUP)
    block = HEAD_GROUP * LATENT_BLOCK * (2 * (m.nope + m.v) + m.nope + m.rope + 2 * ROW_TILE) * 4
    if in_tiles:
        nope, rope, v = (align_up(size, 32) for size in (m.nope, m.rope, m.v))
        packed = max(PACKED_LATENTS, 2 * LATENT_BLOCK * align_up(m.latent + 32, 32))
        operands = 2 * LATENT_BLOCK * (nope + rope + v + 6 * ROW_TILE) + 4 * LATENT_BLOCK * max(
            nope, v
        )
        row = 2 * (nope + rope) + HEAD_GROUP * 4 * (v + 2)  # a query, and its running softmax
        block = packed + operands + (GROUP_ROWS + ROW_TILE) * row
    rows = ROW_TILE * (18 * kda.head_dim + 4 * ROW_TILE) * 4  # sums in float64 count twice
    chunk = 0 if not backend.torch else HEAD_GROUP * (rows + SUB_BLOCK**2 * kda.head_dim * 16)
    return min(threads, groups) * max(block, chunk)


def _one_of_each(spec: ModelSpec) -> list[TensorSpec]:
    """The trunk of one layer of each kind, and one routed expert."""
    kinds = {(la.attention, la.ffn): la.index for la in spec.layers}
    tensors = [t for layer in kinds.values() for t in spec.layer_tensors(layer)]
    return tensors + (spec.expert_tensors(spec.moe_layers[0], 0) if spec.moe_layers else [])


class Mlp(NamedTuple):
    """A feed-forward part: widths, rows of one call, rows of what it is called with, experts."""

    width: int
    inner: int
    rows: int
    given: int
    jobs: int = 1


def mlps(spec: ModelSpec, rows: int) -> list[Mlp]:
    """The feed-forward parts in a sweep of ``rows`` rows."""
    group, m = min(rows, GROUP_ROWS), spec.moe
    parts = [Mlp(spec.hidden, spec.dense_width, group, group)]
    if m is not None:
        parts.append(Mlp(spec.hidden, m.shared_width, group, group))
        parts.append(Mlp(m.io, m.width, min(rows * m.top_k, CALL_ROWS), rows, CALL_JOBS))
    return parts


def kept_buffers(spec: ModelSpec, dtype: str, rows: int, decoding: int, backend: Backend) -> int:
    """Bytes of the native kernels' buffers that all threads share, in a sweep of ``rows`` rows,
    ``decoding`` of which are decode rows at most."""
    if not backend.native:
        return 0
    a, parts = ITEM[dtype], mlps(spec, rows)
    widest = max(spec.hidden, spec.kda.width, spec.mla.heads * spec.mla.v)
    by_tiles = backend.tiles and dtype == "bfloat16"
    one_by_one = min(rows, decoding) if by_tiles else rows
    x = min(X_ROWS, one_by_one) * widest * 4
    middle = rounded = 0
    for part in parts:
        taken = min(part.rows, one_by_one * (part.rows // max(1, part.given) or 1))
        most = max(X_ROWS, ROWS_BYTES // (4 * max(1, part.inner)))
        x = max(x, min(part.given, one_by_one) * part.width * 4)
        middle = max(middle, min(taken, most) * part.inner * 4)
        rounded = max(rounded, min(taken, most) * part.inner * a)
    if by_tiles:
        x = max(x, align_up(min(rows, GROUP_ROWS), PANEL_ROWS) * widest * 2)
        for part in parts:  # each expert of a call fills its last panel up
            x = max(x, (part.rows + PANEL_ROWS * part.jobs) * (part.width + part.inner) * 2)
    return x + middle + rounded


def glu_bytes(dtype: str, backend: Backend) -> tuple[int, int]:
    """Bytes for each number of a feed-forward part's inner width: of all rows, and of a tile."""
    if not backend.torch:
        return 0, 0
    a = ITEM[dtype]
    # gate, up and result; float32 copies of two, and four float32 results in the activation
    return 3 * a, (8 if a < 4 else 0) + 16


def device_scratch(spec: ModelSpec, dtype: str, rows: int, context: int) -> int:
    """Bytes that Triton's operators take beside their results, at most, in a sweep of ``rows``
    rows: one operator at a time."""
    inner = max(part.rows * part.inner for part in mlps(spec, rows)) * ITEM[dtype]
    mixed = mixer_scratch(spec) if spec.kda_layers else 0
    attention = attention_scratch(spec, dtype, rows, context) if spec.mla_layers else 0
    return max(inner, mixed, attention)


def mixer_scratch(spec: ModelSpec) -> int:
    """Of ``device_scratch``, what a KDA layer takes for a chunk of a prompt, float32: its inputs,
    what tokens are to one another in each sub-block, and results before each head's norm."""
    kda, blocks = spec.kda, KDA_CHUNK // SUB_BLOCK
    numbers = KDA_CHUNK * (8 * kda.width + kda.heads)
    return 4 * (numbers + blocks * (kda.width + 2 * SUB_BLOCK**2 * kda.heads))


def attention_scratch(spec: ModelSpec, dtype: str, rows: int, context: int) -> int:
    """Of ``device_scratch``, what attention to latents takes: keys and values of a few blocks and
    the running softmax of a group's rows, or the parts that a decode step merges."""
    m, a = spec.mla, ITEM[dtype]
    up, blocks = m.heads * (m.nope + m.v), -(-context // LATENT_BLOCK)
    tiles = -(-min(rows, GROUP_ROWS) // ROW_TILE) + 1
    running = tiles * m.heads * ROW_TILE * (m.v + 2) * 4 if blocks > EXPANDED else 0
    prompt = min(EXPANDED, blocks) * LATENT_BLOCK * up * a + running
    step = m.heads * (m.kv_lora * 6 + min(RANGES, blocks) * (m.kv_lora + 2) * 4)
    return max(prompt, step)

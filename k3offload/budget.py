"""From a model and its options to the byte counts that the memory plan adds up.

The working set is an upper bound computed from the shapes of the forward pass; how close it comes
to what is measured is recorded in LOG.md.
"""

from __future__ import annotations

import torch

from .checkpoint import Checkpoint
from .config import LATENT_BLOCK, READ_ALIGN, ROW_TILE, align_up
from .kernels.kda_reference import SUB_BLOCK
from .kernels.linear_reference import tile_rows
from .layer_mla import GROUP_TILES
from .layer_mla import HEAD_GROUP as MLA_HEADS
from .layer_moe import EXPERT_ROWS
from .scheduler.plan import Demand
from .spec import ModelSpec, TensorSpec
from .tiers.base import Location
from .tiers.tier_disk import READERS, STAGING, windows
from .weights import arena_size, head_rows

HEAP_SLACK = 18 << 20  #: fragmentation of the C heap and small objects of a running sweep
KERNEL_CODE = 350_000  #: bytes the matrix library keeps for each shape of a bfloat16 product,
#: and as much again for large ones


def demand_of(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    *,
    base: int,
    threads: int,
    context: int,
    sessions: int,
    extra: int = 0,
) -> Demand:
    """The demand of ``checkpoint`` for ``sessions`` sequences of up to ``context`` tokens."""
    spec = checkpoint.spec
    every = checkpoint.globals()
    embed = arena_size([every["embed_tokens.weight"]])
    head = arena_size([every["lm_head.weight"]]) if "lm_head.weight" in every else 0
    small = arena_size(
        t for name, t in every.items() if name not in ("embed_tokens.weight", "lm_head.weight")
    )
    row = every["embed_tokens.weight"].location.length // spec.vocab
    return Demand(
        base=base,
        tiles=_tiles(spec, dtype, threads),
        staging=min(READERS * STAGING, _largest_read(checkpoint)),
        layers=[arena_size(checkpoint.trunk(layer.index)) for layer in spec.layers],
        small=small,
        embed=embed,
        head=head,
        head_block=head_rows(spec, row) * row,
        state=sessions * state_bytes(spec, dtype, context),
        working=lambda rows: working_set(spec, dtype, rows),
        slot=slot_size(checkpoint),
        experts=spec.expert_count,
        top_k=spec.moe.top_k if spec.moe else 0,
        extra=extra,
    )


def state_bytes(spec: ModelSpec, dtype: torch.dtype, context: int) -> int:
    """Bytes of one sequence: KDA state, latents of ``context`` tokens in whole blocks, and its
    last row of logits."""
    tokens = align_up(context, LATENT_BLOCK)
    latents = tokens * spec.latent_bytes_per_token(dtype.itemsize)
    return spec.kda_state_bytes(dtype.itemsize) + latents + spec.vocab * 4


def slot_size(checkpoint: Checkpoint) -> int:
    """Bytes of an expert slot: the page and the alignment of its extents, whatever they are."""
    spec = checkpoint.spec
    if spec.moe is None:
        return 0
    most = 0
    for layer in spec.moe_layers:
        counts = {
            len(checkpoint.expert(layer, expert).extents) for expert in range(spec.moe.experts)
        }
        extents = [Location(0, 4095, 1)] * (max(counts) - 1)
        worst = [*extents, Location(0, 4095, checkpoint.expert_bytes - len(extents))]
        most = max(most, windows(worst)[1])
    return most


def _largest_read(checkpoint: Checkpoint) -> int:
    """Staging is touched only as far as the trunk has bytes to pass through it."""
    return sum(t.location.length for la in checkpoint.spec.layers
               for t in checkpoint.trunk(la.index)) + READERS * READ_ALIGN  # fmt: skip


def _tiles(spec: ModelSpec, dtype: torch.dtype, threads: int) -> int:
    """Scratch of the compute threads and code that the matrix library makes for each shape."""
    coded, tiles, narrow, wide = 0, 1, {(0, 0)}, {(0, 0)}
    for tensor in [*spec.global_tensors(), *_one_of_each(spec)]:
        if len(tensor.shape) != 2 or tensor.shape[0] == 1:
            continue
        packed = "packed" in tensor.name
        n, k = tensor.shape[0], tensor.shape[1] * (2 if packed else 1)
        step = tile_rows(n, k)
        tiles = max(tiles, -(-n // step))
        always_float32 = tensor.name.endswith((".gate.weight", "lm_head.weight"))
        shapes = wide if always_float32 or dtype == torch.float32 else narrow
        shapes |= {(step, k), (n % step, k)}
        if packed:
            coded = max(coded, int(step * k * (0.5 + 1 + 2)))  # packed, index, bfloat16
        elif ".experts." in tensor.name:
            coded = max(coded, step * k * dtype.itemsize)  # copied to an aligned place
    float_tile = max(n * k for n, k in wide) * 4
    code = sum(KERNEL_CODE * (1 + min(1, n * k / 2**19)) for n, k in narrow if n)
    return min(threads, tiles) * (float_tile + coded) + _heads(spec, threads) + int(code)


def _heads(spec: ModelSpec, threads: int) -> int:
    """What the compute threads hold while each attends with a group of heads, float32."""
    m, kda = spec.mla, spec.kda
    groups = -(-m.heads // MLA_HEADS)
    block = MLA_HEADS * LATENT_BLOCK * (2 * (m.nope + m.v) + m.nope + m.rope + 2 * ROW_TILE) * 4
    rows = ROW_TILE * (18 * kda.head_dim + 4 * ROW_TILE) * 4  # sums in float64 count twice
    chunk = MLA_HEADS * (rows + SUB_BLOCK**2 * kda.head_dim * 16)
    return min(threads, groups) * max(block, chunk)


def _one_of_each(spec: ModelSpec) -> list[TensorSpec]:
    """The trunk of one layer of each kind, and one routed expert."""
    kinds = {(la.attention, la.ffn): la.index for la in spec.layers}
    tensors = [t for layer in kinds.values() for t in spec.layer_tensors(layer)]
    return tensors + (spec.expert_tensors(spec.moe_layers[0], 0) if spec.moe_layers else [])


def working_set(spec: ModelSpec, dtype: torch.dtype, rows: int) -> int:
    """Bytes of the activations of a sweep of ``rows`` tokens, at its largest moment."""
    a, h = dtype.itemsize, spec.hidden
    rows = align_up(rows, ROW_TILE)
    sums = 1 + (-(-len(spec.layers) // spec.attnres_block) if spec.attnres_block else 1)
    kept = rows * h * a * sums
    kda, mla, m = spec.kda, spec.mla, spec.moe
    group = min(rows, GROUP_TILES * ROW_TILE)
    query = mla.heads * (mla.nope + mla.rope)
    moments = [
        ROW_TILE * kda.width * (6 * a + 52) if spec.kda_layers else 0,
        group * (query * (a + 4) + mla.heads * mla.v * 12 + h * a * 2) if spec.mla_layers else 0,
        ROW_TILE * spec.dense_width * (3 * a + 28),
        ROW_TILE * h * 4 * (sums + 4) + ROW_TILE * spec.vocab * 4,
    ]
    if m is not None:
        per_row = (m.io + (h if m.shared_width else 0)) * a + m.top_k * (m.io * a + 48)
        # gate and up, float32 copies of both, and four float32 results at once in the activation
        glu = 2 * a + (8 if a < 4 else 0) + 16
        shared = ROW_TILE * m.shared_width * glu
        group = min(rows, EXPERT_ROWS)
        routed = group * (m.width * 2 * a + m.io * 2 * a) + ROW_TILE * m.width * (glu - 2 * a)
        moments.append(rows * per_row + max(shared, routed) + ROW_TILE * m.experts * 40)
    return kept + max(moments) + HEAP_SLACK

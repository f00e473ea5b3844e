"""From a model and its options to the byte counts that the memory plan adds up.

The working set is an upper bound computed from the shapes of the forward pass; how close it comes
to what is measured is recorded in LOG.md.
"""

from __future__ import annotations

from .budget_kernels import ITEM, Backend, glu_bytes, kept_buffers, mlps, thread_bytes
from .config import GROUP_ROWS, LATENT_BLOCK, READ_ALIGN, ROW_TILE, align_up
from .forecast_sizes import distinct, token_macs
from .kernels.latent_format import PROMPT_ROOM, LatentFormat
from .layout import EMBED, HEAD, Layout, arena_size, head_buffers, head_tensors, quantising
from .scheduler.plan import Demand, Latents, Summaries
from .scheduler.reuse import memory
from .spec import ModelSpec
from .tiers.base import Location
from .tiers.spill_room import GOOD, least_room, place
from .tiers.tier_disk import READERS, STAGING, windows

BACKEND = Backend()
HEAP_SLACK = 14 << 20  #: fragmentation of the C heap and small objects of a running sweep
#: multiply-adds for each byte read, from which on no processor waits for its drive: four times
#: those of a fast one (1 TMAC/s) beside a drive of 5 GB/s
BALANCE = 800
SLOT_OBJECTS = 8_000  #: bytes of the Python objects that say where an expert's weights lie


def demand_of(
    layout: Layout,
    dtype: str,
    *,
    base: int,
    threads: int,
    context: int,
    sessions: int,
    extra: int = 0,
    trunk: str = "bfloat16",
    backend: Backend = BACKEND,
    policy: str = "reuse",
    prefixes: tuple[int, int] = (0, 0),
    latent_dtype: str | None = None,
) -> Demand:
    """The demand of ``layout`` for ``sessions`` sequences of up to ``context`` tokens, activations
    in ``dtype``, the trunk held in the precision ``trunk``, slots kept by ``policy``, ``prefixes``
    bytes of snapshots that they share; the second number if latents spill.  ``latent_dtype``: the
    precision of latents if it is another than ``dtype``."""
    spec, every, slot = layout.spec, layout.globals(), slot_size(layout)
    return Demand(
        base=base,
        tiles=thread_bytes(spec, dtype, threads, backend)
        + quantising(layout, trunk, threads)
        + latent_form(spec, dtype, latent_dtype).room(context, PROMPT_ROOM),
        staging=min(READERS * STAGING, _largest_read(layout)),
        layers=[arena_size(layout.trunk(layer.index), trunk) for layer in spec.layers],
        small=arena_size(t for n, t in every.items() if n != EMBED and not n.startswith(HEAD)),
        embed=arena_size([every[EMBED]]),
        head=arena_size(head_tensors(layout), trunk),
        head_block=sum(head_buffers(layout, trunk)),
        state=sessions * state_bytes(spec, dtype, context, latent_dtype),
        working=lambda rows: working_set(spec, dtype, rows, sessions, backend),
        slot=slot,
        tables=policy_bytes(spec, policy),
        slot_objects=SLOT_OBJECTS if slot else 0,
        experts=spec.expert_count,
        top_k=spec.moe.top_k if spec.moe else 0,
        extra=extra,
        prefixes=prefixes[0],
        prefixes_spilled=prefixes[1],
        asked=lambda rows: asked_bytes(spec, rows),
        longest=BALANCE * spec.expert_count * spec.expert_bytes // token_macs(spec) or None,
        latents=latents_of(spec, dtype, context, sessions, latent_dtype),
        summaries=summaries_of(spec, dtype),
    )


def asked_bytes(spec: ModelSpec, rows: int) -> float:
    """Bytes of the experts that a sweep of ``rows`` tokens asks for, if routing is uniform."""
    if spec.moe is None:
        return 0.0
    each = distinct(spec.moe.experts, spec.moe.top_k, rows) * spec.expert_bytes
    return each * len(spec.moe_layers)


def policy_bytes(spec: ModelSpec, policy: str) -> int:
    """Bytes that the cache policy remembers beside a few hundred for each slot."""
    if spec.moe is None or policy != "reuse":
        return 0
    return memory(len(spec.moe_layers), spec.moe.experts)


def latent_form(spec: ModelSpec, dtype: str, latent_dtype: str | None) -> LatentFormat:
    """How a layer keeps latents."""
    return LatentFormat(spec.mla.kv_lora, spec.mla.rope, ITEM[dtype], latent_dtype)


def state_bytes(spec: ModelSpec, dtype: str, context: int, latent_dtype: str | None = None) -> int:
    """Bytes of one sequence: KDA state, latents of ``context`` tokens in whole blocks, and its
    last row of logits."""
    tokens = align_up(context, LATENT_BLOCK)
    latents = tokens * len(spec.mla_layers) * latent_form(spec, dtype, latent_dtype).row
    return spec.kda_state_bytes(ITEM[dtype]) + latents + spec.vocab * 4


def latents_of(
    spec: ModelSpec, dtype: str, context: int, sessions: int, latent_dtype: str | None = None
) -> Latents | None:
    """The latents of ``sessions`` sequences of ``context`` tokens, in whole blocks."""
    if not spec.mla_layers:
        return None
    mla, layers = spec.mla, len(spec.mla_layers)
    block = LATENT_BLOCK * latent_form(spec, dtype, latent_dtype).row
    whole = sessions * layers * align_up(context, LATENT_BLOCK) // LATENT_BLOCK * block
    least = least_room() * place(block)
    return Latents(
        whole=whole,
        open=sessions * layers * block,
        # a group that begins inside a tile has rows of one more
        carried=(GROUP_ROWS + ROW_TILE) * mla.heads * (align_up(mla.v, 32) + 2) * 4,
        least=least,
        good=min(GOOD, max(least, whole // 8)),
    )


def summaries_of(spec: ModelSpec, dtype: str) -> Summaries | None:
    """The block summaries of a sweep."""
    if spec.attnres_block is None:
        return None
    count = -(-len(spec.layers) // spec.attnres_block)
    tile = LATENT_BLOCK * spec.hidden * ITEM[dtype]
    return Summaries(count * spec.hidden * ITEM[dtype], least_room(count) * place(tile))


def slot_size(layout: Layout) -> int:
    """Bytes of an expert slot: the page and the alignment of its extents, whatever they are."""
    spec = layout.spec
    if spec.moe is None:
        return 0
    most = 0
    for layer in spec.moe_layers:
        counts = {len(layout.expert(layer, expert).extents) for expert in range(spec.moe.experts)}
        extents = [Location(0, 4095, 1)] * (max(counts) - 1)
        worst = [*extents, Location(0, 4095, layout.expert_bytes - len(extents))]
        most = max(most, windows(worst)[1])
    return most


def _largest_read(layout: Layout) -> int:
    """Staging is touched only as far as the trunk has bytes to pass through it."""
    return sum(t.location.length for la in layout.spec.layers
               for t in layout.trunk(la.index)) + READERS * READ_ALIGN  # fmt: skip


def working_set(
    spec: ModelSpec, dtype: str, rows: int, sessions: int = 1, backend: Backend = BACKEND
) -> int:
    """Bytes of the activations of a sweep of ``rows`` tokens, at its largest moment."""
    a, h = ITEM[dtype], spec.hidden
    sums = 1 + (-(-len(spec.layers) // spec.attnres_block) if spec.attnres_block else 1)
    kept = rows * h * a * sums
    kept += rows * len(spec.layers) * (4 * a + 3)  # both ends of each row, twice, and flags
    kda, mla, m = spec.kda, spec.mla, spec.moe
    group, tile = min(rows, GROUP_ROWS), min(rows, ROW_TILE)
    apart = tile if backend.torch else 0  # rows in float32 copies that native operators do without
    query = mla.heads * (mla.nope + mla.rope)
    all_rows, one_tile = glu_bytes(dtype, backend)
    inside = [
        part.rows * (part.inner * all_rows + part.width * a) + tile * part.inner * one_tile
        for part in mlps(spec, rows)
    ]
    moments = [
        group * (kda.width * 7 * a + h * a * 2) + apart * kda.width * 40 if spec.kda_layers else 0,
        group * (query * 2 * a + mla.heads * mla.v * (12 + a) + h * a * 2)
        if spec.mla_layers
        else 0,
        inside[0] + group * h * a,
        tile * (h * a * (sums + 2) + h * 8 + spec.vocab * 8),
    ]
    if m is not None:
        per_row = h * a + m.io * a * 2 + m.top_k * (m.io * a + 128)  # lists of Python's integers
        combined = apart * m.io * 16 + group * (m.io + h) * a * 2
        scored = group * (m.experts * 12 + h * 4)
        moments.append(rows * per_row + max(*inside[1:], combined, scored))
    buffers = kept_buffers(spec, dtype, rows, sessions, backend)
    return kept + max(moments) + buffers + HEAP_SLACK

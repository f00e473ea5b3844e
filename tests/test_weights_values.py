"""How the trunk lies in memory, what loading takes beside it, values that are refused, experts.

R35 (no tensor is in memory whole beside its codes), R54 and R55 (values that no sound file has).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from k3offload.checkpoint import Checkpoint, Tensor
from k3offload.errors import CheckpointError
from k3offload.kernels.workers import Workers
from k3offload.layout import ALIKE, arena_size, lay_out
from k3offload.tiers.base import Buffer, Location, PageId
from k3offload.tiers.tier_disk import windows
from tests.helpers_checkpoint import Raw, change_shard, shards, tiny
from tests.helpers_engine import BRIEF, checkpoint
from tests.helpers_memory import HEAD, MB, TRUNK, measure
from tests.helpers_tiers import aligned
from tests.helpers_weights import Asked, all_resident, visit, weights_of


@pytest.fixture
def opened() -> Checkpoint:
    return Checkpoint.open(checkpoint(**BRIEF))


@pytest.fixture
def disk(opened: Checkpoint) -> Iterator[Asked]:
    tier = Asked(opened)
    yield tier
    tier.close()


# ---- how it lies in memory ----


def test_places_follow_the_file_where_they_can() -> None:
    """Large arrays of a pack are read without a copy; everything else lies at 64 bytes."""
    large, small = ALIKE // 128, 3
    rng = np.random.default_rng(1)
    for unit in (4096, 64, 8, 2):
        end, tensors = int(rng.integers(1, 900)) * unit, []
        for rows in rng.permutation([large, large + 1, small, large + 7, small, 1]):
            place = Location(0, end, int(rows) * 128)
            tensors.append(Tensor(f"{end}.weight", "BF16", (int(rows), 64), place))
            end += place.length + int(rng.integers(0, 2)) * unit * int(rng.integers(1, 90_000))
        items, size = lay_out(tensors[::-1], "bfloat16")
        free = 0
        for item, tensor in zip(items, tensors, strict=True):
            assert item.tensor == tensor and item.at[0] >= free and not item.at[0] % 64
            follows = item.at[0] % 4096 == tensor.location.offset % 4096
            assert follows or unit < 64 or tensor.shape[0] <= small
            free = item.at[0] + tensor.location.length
        assert free <= size == arena_size(tensors) < free + 64
        assert size < sum(t.location.length for t in tensors) + 6 * 4096


QUANTISE = (
    HEAD
    + """
from k3offload.checkpoint import Checkpoint
from k3offload.kernels.quantize import quantize_into
from k3offload.kernels.workers import Workers
from k3offload.machine import steady_allocator
from k3offload.precision import GROUP
from k3offload.layout import quantising
from tests.helpers_weights import Asked, weights_of
import torch
steady_allocator()
precision, resident = arguments["precision"], arguments["resident"]
opened = Checkpoint.open(folder)
disk, workers = Asked(opened, readers=2), Workers(2)
for kind in (torch.bfloat16, torch.float32):
    w = torch.ones(4, 64, dtype=kind)
    codes = torch.empty(4, 64 if precision == "int8" else 32)
    quantize_into(w, precision, codes, torch.empty(4, 64 // GROUP[precision]))
before = settled()
weights = weights_of(opened, disk, resident, 2, precision, True, workers)
for layer in [0, 1, 2] * 2:
    with weights.layer(layer):
        pass
held = sum(w.size for w in (weights.globals, weights._embed_held, weights._head_held))
held += sum(w.size for w in weights._resident.values())
held += sum(b.size for b in weights._ring.buffers) if weights._ring else 0
print(json.dumps({"grown": peak_rss() - before, "held": held,
                  "allowed": quantising(opened, precision, 2)}))
weights.close()
disk.close()
"""
)


@pytest.mark.parametrize(("precision", "resident"), [("int8", [0, 1, 2]), ("mxfp4", [1])])
def test_quantising_takes_what_is_planned_for_it_r35(precision: str, resident: list[int]) -> None:
    """No tensor is in memory whole beside its codes: the largest has 34 MB."""
    found = measure(QUANTISE, checkpoint(**TRUNK), precision=precision, resident=resident)
    most = min(found["allowed"] + 6 * MB, 32 * MB)  # and the staging buffers of two readers
    assert found["held"] < found["grown"] <= found["held"] + most, found


# ---- values that are refused ----


def _spoil(folder: Path, layer: int, name: str, at: int, value: bytes) -> None:
    def change(tensors: dict[str, Raw]) -> None:
        for full, raw in tensors.items():
            if full.endswith(name):
                data = raw.data[:at] + value + raw.data[at + len(value) :]
                tensors[full] = Raw(raw.dtype, raw.shape, data)

    change_shard(shards(folder)[layer], change)


@pytest.mark.parametrize("precision", ["int8", "mxfp4"])
@pytest.mark.parametrize(
    "value", [b"\xc0\x7f", b"\x80\x7f", b"\x80\xff"], ids=["nan", "inf", "-inf"]
)
def test_a_trunk_that_is_not_finite_cannot_be_quantised(
    tmp_path: Path, precision: str, value: bytes
) -> None:
    folder, name = tiny(tmp_path / "m", **BRIEF), "self_attn.o_proj.weight"
    _spoil(folder, 2, name, 5000, value)
    opened = Checkpoint.open(folder)
    disk = Asked(opened)
    with pytest.raises(CheckpointError, match=rf"layers\.2\.{name}.*not finite"):
        all_resident(opened, disk, precision)
    weights = weights_of(opened, disk, precision=precision)
    visit(weights, 1)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=rf"layers\.2\.{name}.*not finite"):
            visit(weights, 2)
    visit(weights, 3)
    weights.close()
    disk.close()


def test_the_tail_of_a_log_is_checked_in_streamed_layers_too_r55(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m", **BRIEF)
    heads = Checkpoint.open(folder).spec.kda.heads
    _spoil(folder, 1, "self_attn.A_log", heads * 4, b"\0\0\x80\x3f")
    opened = Checkpoint.open(folder)
    disk = Asked(opened)
    weights = weights_of(opened, disk)
    visit(weights, 0)
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.A_log is not zero"):
        visit(weights, 1)
    weights.close()
    disk.close()


# ---- experts ----


def test_an_expert_is_made_and_checked_once_for_each_stay(opened: Checkpoint, disk: Asked) -> None:
    weights = all_resident(opened, disk)
    pages = [PageId(1, 0), PageId(1, 1)]
    _, size = windows(opened.expert(*pages[0]).extents)
    slot, other = aligned(size + 4096), aligned(size + 4096)

    def fill(page: PageId, into: Buffer) -> int:
        disk.read(page, into).wait()
        place = opened.expert(*page)
        starts, _ = windows(place.extents)
        _, extent, delta, _ = next(p for p in place.parts if p.key == "w1.weight_scale")
        return starts[extent] + delta

    def rows(page: PageId) -> torch.Tensor:
        return weights.expert(page, slot)[0].rows(0, 8, torch.float32, Workers(1)).clone()

    fill(pages[0], slot)
    first = weights.expert(pages[0], slot)
    wanted = rows(pages[0])
    assert weights.expert(pages[0], slot) is first
    fill(pages[0], other)
    assert weights.expert(pages[0], other) is not first, "another slot, other addresses"
    at = fill(pages[1], slot)
    assert weights.expert(pages[1], slot) is not first
    assert not torch.equal(rows(pages[1]), wanted)
    fill(pages[0], slot)
    assert torch.equal(rows(pages[0]), wanted)
    fill(pages[1], slot)
    slot[at] = 255
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"expert 1: w1\.weight_scale holds 255"):
            weights.expert(pages[1], slot)

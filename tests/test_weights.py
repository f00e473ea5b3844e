"""The trunk under a plan: what streams is read ahead, exactly, and never into memory in use.

Its places in memory and the values it refuses: ``test_weights_values.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import k3offload.layout
from k3offload.checkpoint import Checkpoint
from k3offload.errors import ReadError
from k3offload.pack import pack
from k3offload.precision import PRECISIONS
from k3offload.tiers.base import Priority
from k3offload.weights import Weights
from tests.helpers_engine import BRIEF, checkpoint
from tests.helpers_weights import (
    PATIENCE,
    Asked,
    Reads,
    all_resident,
    buffers_of_head,
    bytes_of,
    eventually,
    head_of,
    shard_of,
    visit,
    weights_of,
)

LAYERS = 5
Bytes = dict[str, bytes]


@pytest.fixture(scope="module")
def opened() -> Checkpoint:
    return Checkpoint.open(checkpoint(**BRIEF))


@pytest.fixture
def disk(opened: Checkpoint) -> Iterator[Asked]:
    tier = Asked(opened)
    yield tier
    tier.close()


@pytest.fixture(scope="module")
def truth(opened: Checkpoint) -> dict[str, list[Bytes]]:
    """precision -> each layer's arrays, all of it resident."""
    tier, found = Asked(opened), {}
    for precision in PRECISIONS:
        weights = all_resident(opened, tier, precision)
        found[precision] = [bytes_of(weights._resident[i]) for i in range(LAYERS)]
    tier.close()
    return found


def ready(weights: Weights, layer: int) -> None:
    """Wait until ``layer`` has been read ahead."""
    eventually(lambda: weights.peek(layer) is not None)


# ---- what comes is right, whatever the plan ----


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("resident", "buffers"), [((), 2), ((), 1), ((0, 2), 2), ((1, 3), 1), ((0, 1, 2, 3), 2)]
)
def test_streamed_equals_resident(
    opened: Checkpoint, disk: Asked, truth: dict[str, list[Bytes]], precision: str,
    resident: tuple[int, ...], buffers: int,
) -> None:  # fmt: skip
    weights = weights_of(opened, disk, resident, buffers, precision)
    for sweep in range(3):
        for layer in range(LAYERS):
            assert visit(weights, layer) == truth[precision][layer], (sweep, layer)
    weights.close()
    c = weights.counts
    assert c.requests == c.hits + c.late + c.misses == 3 * LAYERS
    assert c.misses == 1, "all but the first are read ahead"
    assert not precision.startswith("b") or truth["int8"] != truth["bfloat16"]


@pytest.mark.parametrize("buffers", [1, 2])
def test_layers_out_of_turn(
    opened: Checkpoint, disk: Asked, truth: dict[str, list[Bytes]], buffers: int
) -> None:
    """A sweep that failed starts again at the first layer; a predictor looks where it likes."""
    weights = weights_of(opened, disk, (1,), buffers)
    for layer in np.random.default_rng(3).integers(0, LAYERS, 60):
        assert visit(weights, int(layer)) == truth["bfloat16"][layer]
    with pytest.raises(KeyError), weights.layer(3):
        raise KeyError
    assert visit(weights, 3) == truth["bfloat16"][3]
    weights.close()


def test_a_layer_out_of_turn_waits_for_the_memory(
    opened: Checkpoint, disk: Asked, truth: dict[str, list[Bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody wants any more is given up, but a read that runs still writes to its buffer."""
    reads = Reads(monkeypatch)
    weights = weights_of(opened, disk, buffers=1)
    reads.hold(shard_of(opened, 1))
    visit(weights, 0)
    reads.wait_for(shard_of(opened, 1))
    found: list[Bytes] = []
    thread = threading.Thread(target=lambda: found.append(visit(weights, 3)), daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive() and shard_of(opened, 3).name not in reads.begun
    reads.release()
    thread.join(PATIENCE)
    assert found == [truth["bfloat16"][3]]
    weights.close()


def test_a_layer_stays_while_it_is_used(
    opened: Checkpoint, disk: Asked, truth: dict[str, list[Bytes]]
) -> None:
    weights = weights_of(opened, disk)
    for layer in range(2 * LAYERS):
        with weights.layer(layer % LAYERS) as w:
            ready(weights, (layer + 1) % LAYERS)
            assert bytes_of(w) == truth["bfloat16"][layer % LAYERS]
    weights.close()


def test_a_weight_is_the_same_object_every_time(opened: Checkpoint, disk: Asked) -> None:
    """Kernels remember where a weight lies."""
    weights, name = weights_of(opened, disk), "self_attn.o_proj.weight"
    seen: dict[int, set[int]] = {}
    kept = []
    for sweep in range(4):
        for layer in range(LAYERS):
            with weights.layer(layer) as w:
                assert w.matrix(name) is w.matrix(name)
                kept.append(w.matrix(name))
                seen.setdefault(layer, set()).add(id(w.matrix(name)))
        # An odd number of layers: after two sweeps each has been in both buffers.
        assert sweep < 2 or all(len(ids) == 2 for ids in seen.values())
    weights.close()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_pack_holds_the_same_codes(
    opened: Checkpoint, truth: dict[str, list[Bytes]], precision: str, tmp_path: Path
) -> None:
    """Quantised while packing or while loading, resident or streamed: the same bytes."""
    pack(opened.folder, tmp_path / "p", precision, threads=2)
    packed = Checkpoint.open(tmp_path / "p")
    assert packed.spec.trunk_precision == precision
    disk = Asked(packed)
    weights = weights_of(packed, disk, (1,), 2, precision)
    for layer in range(LAYERS):
        assert visit(weights, layer) == truth[precision][layer]
    weights.close()
    disk.close()


# ---- when it is read ----


def test_the_next_layer_is_read_while_one_is_used(opened: Checkpoint, disk: Asked) -> None:
    """Round and round, at the trunk's priority; only the first layer of all is a demand."""
    weights = weights_of(opened, disk)
    disk.asked.clear()
    for layer in [*range(LAYERS), *range(LAYERS)]:
        with weights.layer(layer):
            ready(weights, (layer + 1) % LAYERS)  # before this one is left
    files = [opened.trunk(layer)[0].location.file for layer in range(LAYERS)]
    order = [*files, *files, files[0]]
    assert {file for file, _ in disk.asked[:2]} == set(order[:2])  # begun at the same time
    assert dict(disk.asked[:2])[order[0]] == Priority.DEMAND
    assert disk.asked[2:] == [(file, Priority.TRUNK) for file in order[2:]]
    c = weights.counts
    assert (c.hits, c.late, c.misses) == (2 * LAYERS - 1, 0, 1)
    sizes = [sum(t.location.length for t in opened.trunk(i % LAYERS)) for i in range(len(order))]
    assert c.bytes == sum(sizes)
    weights.close()


def test_one_buffer_is_filled_once_it_is_left(
    opened: Checkpoint, disk: Asked, truth: dict[str, list[Bytes]]
) -> None:
    weights = weights_of(opened, disk, buffers=1)
    disk.asked.clear()
    with weights.layer(0) as w:
        assert len(disk.asked) == 1
        assert bytes_of(w) == truth["bfloat16"][0]
    ready(weights, 1)
    assert len(disk.asked) == 2
    assert visit(weights, 1) == truth["bfloat16"][1]
    assert weights.counts.hits == 1
    weights.close()


def test_a_late_layer_is_raised_to_demand(
    opened: Checkpoint, disk: Asked, truth: dict[str, list[Bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch)
    weights = weights_of(opened, disk)
    reads.hold(shard_of(opened, 1))
    visit(weights, 0)
    reads.wait_for(shard_of(opened, 1))
    assert weights.peek(1) is None
    found: list[Bytes] = []
    thread = threading.Thread(target=lambda: found.append(visit(weights, 1)), daemon=True)
    thread.start()
    eventually(lambda: opened.trunk(1)[0].location.file in disk.raised)
    thread.join(0.05)
    assert thread.is_alive() and not found
    reads.release()
    thread.join(PATIENCE)
    assert found == [truth["bfloat16"][1]]
    c = weights.counts
    assert (c.requests, c.late, c.misses) == (2, 1, 1)
    assert c.wait_seconds > 0.05
    weights.close()


# ---- when reads fail ----


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
@pytest.mark.parametrize("late", [False, True])
def test_a_failed_read_ahead_is_tried_again(
    opened: Checkpoint, disk: Asked, truth: dict[str, list[Bytes]], precision: str, late: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Nobody hears of it, unless the layer cannot be read when it is needed either."""
    reads, bad = Reads(monkeypatch), shard_of(opened, 1)
    weights = weights_of(opened, disk, precision=precision)
    reads.broken.add(bad.name)
    if late:
        reads.hold(bad)
    visit(weights, 0)
    reads.wait_for(bad)
    fetch = next(f for f in weights._ring._fetches if f and f.weights.layer == 1)  # type: ignore[union-attr]
    if late:
        threading.Timer(0.1, reads.mend).start()
    else:
        eventually(fetch.failed)
        with pytest.raises(ReadError, match=bad.name):
            visit(weights, 1)
        reads.broken.clear()
    assert visit(weights, 1) == truth[precision][1]
    assert visit(weights, 2) == truth[precision][2]
    c = weights.counts
    assert c.requests == c.hits + c.late + c.misses
    assert c.misses == (1 if late else 3)
    weights.close()


def test_a_failed_demand_leaves_no_former_layer(
    opened: Checkpoint, disk: Asked, truth: dict[str, list[Bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch)
    weights = weights_of(opened, disk)
    reads.broken.add(shard_of(opened, 0).name)
    for _ in range(2):
        with pytest.raises(ReadError):
            visit(weights, 0)
        assert visit(weights, 1) == truth["bfloat16"][1]
    reads.broken.clear()
    assert visit(weights, 0) == truth["bfloat16"][0]
    weights.close()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_close_while_a_layer_is_on_its_way(
    opened: Checkpoint, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for reads that run, drops those that have not begun, and then nothing writes."""
    disk = Asked(opened, readers=1)
    reads = Reads(monkeypatch)
    weights = weights_of(opened, disk, precision=precision)
    visit(weights, 0)
    ready(weights, 1)
    reads.hold(shard_of(opened, 2))
    visit(weights, 1)
    reads.wait_for(shard_of(opened, 2))
    begun = len(reads.begun)
    closing = threading.Thread(target=weights.close, daemon=True)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    reads.release()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert len(reads.begun) == begun, "reads that had not begun were dropped"
    assert weights._ring is not None
    for buffer in weights._ring.buffers:
        buffer[:] = 0xA5
    disk.close()
    assert all((buffer == 0xA5).all() for buffer in weights._ring.buffers)
    assert not [t for t in threading.enumerate() if t.name.startswith("k3-trunk")]


# ---- the head ----


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_streamed_head_is_the_resident_one(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(k3offload.layout, "HEAD_BUFFER", 1 << 20)
    opened = Checkpoint.open(checkpoint(vocab=20_000, layers=2, vision=False))
    disk = Asked(opened)
    wanted = head_of(all_resident(opened, disk, precision))
    assert buffers_of_head(opened, precision) == 2
    weights = weights_of(opened, disk, (0, 1), 0, precision, head=False)
    for _ in range(2):
        assert torch.equal(head_of(weights), wanted)
        for _ in weights.head_blocks():
            break
    c, blocks = weights.head_counts, weights._head_ring
    assert (c.requests, c.hits, c.misses) == (4, 0, 4)
    assert blocks is not None and blocks.counts.hits + blocks.counts.late > blocks.counts.misses
    assert c.bytes >= 2 * opened.globals()["lm_head.weight"].location.length
    weights.close()
    disk.close()

"""Blocks between a device, RAM and disk under drawn schedules, on a device that delays, reorders
and fails: every byte comes back, and what is lost is lost to its owner alone (R58, R61)."""

from __future__ import annotations

import gc
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from k3offload.config import LATENT_BLOCK
from k3offload.errors import ScratchError
from k3offload.kernels.linear_reference import DenseWeight
from k3offload.kernels.mla_prefill_reference import Query
from k3offload.kernels.triton_run import interpreted
from k3offload.kernels.workers import Workers
from k3offload.spilling import as_block
from k3offload.tiers.device import DeviceError
from k3offload.tiers.device_fake import POISON, FakeDevice, FakeMark
from k3offload.tiers.device_spill import DeviceBlock, DeviceSpill
from k3offload.tiers.spill import Spill, SpillArray
from k3offload.tiers.spill_files import Layout
from k3offload.tiers.spill_room import Room, stride
from tests.contract.test_kernel import generator, same_bits
from tests.helpers_ops import randn
from tests.test_spill import ODD, WIDE, Case

pytest.importorskip("zarr")
TYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
ARRAYS = 4
LEAST = Room(2, 1)


class Poisoning(DeviceSpill):
    """Spoils a slot when it is given back."""

    def _give_back(self, place: Any, error: ScratchError | None = None) -> None:
        slot = place.slot
        super()._give_back(place, error)
        self._bytes(slot).fill_(POISON)


class Window:
    """A device over a spill in a folder of its own."""

    def __init__(
        self,
        place: Path,
        layout: Layout,
        slots: Room,
        ram: Room,
        seed: int = 0,
        delay: float = 2e-4,
    ) -> None:
        kind = TYPES[layout.dtype]
        self.case = Case(place, layout, ram, as_block(kind, layout.width))
        below: Spill[torch.Tensor] = self.case.spill
        size = (slots.slots + 2 * slots.piece) * stride(layout.block)
        self.device = FakeDevice(size, seed, delay)
        self.spill = Poisoning(below, self.device, slots)
        assert self.device.free_bytes() == 0
        self.kind = kind

    def data(self) -> torch.Tensor:
        made: torch.Tensor = self.case.spill.view(self.case.data())
        return made

    def array(self) -> SpillArray:
        return self.case.spill.array("latents")

    def read(self, blocks: list[DeviceBlock]) -> list[bytes]:
        """As a kernel does, which spoils the buffers of a piece before it asks for the next."""
        got = []
        buffers = self.spill._memory[self.spill.room.slots * self.spill._stride :]
        for piece in self.spill.pieces(blocks):
            got += [raw(block) for block in piece]
            for block in piece:
                if buffers.data_ptr() <= block.data_ptr():
                    block.view(torch.uint8).fill_(POISON)
        return got

    def close(self) -> None:
        self.device.let_go()
        self.spill.close()
        self.device.close()
        self.case.close()


def raw(block: torch.Tensor) -> bytes:
    return block.contiguous().view(torch.uint8).numpy().tobytes()


class Array:
    """Blocks of an array, and what they hold."""

    def __init__(self, array: SpillArray) -> None:
        self.array, self.blocks, self.given = array, list[DeviceBlock](), list[bytes]()

    def grow(self, window: Window, count: int) -> None:
        for _ in range(count):
            data = window.data()
            self.blocks.append(window.spill.append(self.array, data))
            self.given.append(raw(data))
            data.view(torch.uint8).fill_(POISON)  # the open block is written anew at once

    @property
    def lost(self) -> bool:
        return any(block.place.error is not None for block in self.blocks)


class Schedules(RuleBasedStateMachine):
    @initialize(
        seed=st.integers(0, 2**16), layout=st.sampled_from([WIDE, ODD]),
        slots=st.builds(Room, st.integers(2, 9), st.integers(1, 3)),
        ram=st.builds(Room, st.integers(2, 9), st.integers(1, 4)),
    )  # fmt: skip
    def build(self, seed: int, layout: Layout, slots: Room, ram: Room) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="k3-")
        self.window = Window(Path(self.folder.name) / "s", layout, slots, ram, seed)
        self.arrays: list[Array] = []
        self.failing = False

    def _some(self, which: int) -> Array:
        self.window.device.let_go()  # or this thread would wait for good
        while which >= len(self.arrays):
            self.arrays.append(Array(self.window.array()))
        return self.arrays[which]

    @rule(which=st.integers(0, ARRAYS - 1), count=st.integers(1, 6))
    def grow(self, which: int, count: int) -> None:
        self._some(which).grow(self.window, count)  # never fails for what others have lost

    @rule(which=st.integers(0, ARRAYS - 1), keep=st.integers(0, 9))
    def fork(self, which: int, keep: int) -> None:
        if which < len(self.arrays) < ARRAYS:
            old, new = self.arrays[which], Array(self.window.array())
            new.blocks, new.given = old.blocks[:keep], old.given[:keep]
            self.arrays.append(new)

    @rule(which=st.integers(0, ARRAYS - 1))
    def end(self, which: int) -> None:
        if which < len(self.arrays):
            del self.arrays[which]

    @rule(which=st.integers(0, ARRAYS - 1))
    def read(self, which: int) -> None:
        one = self._some(which)
        try:
            assert self.window.read(one.blocks) == one.given
        except ScratchError:
            assert self.failing
            if not one.lost:  # a copy to a buffer failed: the blocks themselves are where they were
                self.window.device.heal()
                assert self.window.read(one.blocks) == one.given
        else:
            assert not one.lost

    @rule(which=st.integers(0, ARRAYS - 1), pieces=st.integers(0, 2))
    def give_up(self, which: int, pieces: int) -> None:
        """A reader that is interrupted in the middle, copies under way."""
        one = self._some(which)
        try:
            walk = self.window.spill.pieces(one.blocks)
            for _ in range(pieces):
                next(walk, None)
        except ScratchError:
            assert self.failing

    @rule(which=st.integers(0, ARRAYS - 1), number=st.integers(0, 99))
    def copy_elsewhere(self, which: int, number: int) -> None:
        """A save, in a thread of its own."""
        one = self._some(which)
        if not one.blocks or one.lost:
            return
        number %= len(one.blocks)
        got: list[bytes] = []
        thread = threading.Thread(
            target=lambda: got.append(raw(self.window.spill.rows(one.blocks[number])))
        )
        thread.start()
        thread.join()
        assert got == [one.given[number]]

    @rule()
    def hold(self) -> None:
        self.window.device.hold()

    @rule(at_once=st.booleans())
    def break_a_copy(self, at_once: bool) -> None:
        self.window.device.fail_next(at_once)
        self.failing = True

    @invariant()
    def every_slot_is_somewhere(self) -> None:
        if not hasattr(self, "window"):
            return
        spill = self.window.spill
        used = [place.slot for place in (*spill._held, *spill._leaving)]
        assert sorted([*spill._free, *used]) == list(range(spill.room.slots))  # type: ignore[type-var]

    def teardown(self) -> None:
        if not hasattr(self, "window"):
            return
        self.window.device.let_go()
        self.arrays.clear()
        gc.collect()
        spill = self.window.spill
        while spill._leaving:
            spill._arrived(wait=True)
        spill._tidy()
        assert sorted(spill._free) == list(range(spill.room.slots))
        self.window.close()
        self.folder.cleanup()


Schedules.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSchedules = Schedules.TestCase


# ---- what a schedule would not meet by chance ----


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Window]]:
    made: list[Window] = []

    def window(slots: Room = LEAST, ram: Room = LEAST, **how: Any) -> Window:
        made.append(Window(tmp_path / "s", WIDE, slots, ram, **how))
        return made[-1]

    yield window
    for one in made:
        one.close()


def test_memory_that_suffices_is_never_left(make: Callable[..., Window]) -> None:
    window = make(Room(20, 1))
    one = Array(window.array())
    one.grow(window, 9)
    assert window.read(one.blocks) == one.given
    assert window.spill.counts.written_bytes == window.spill.counts.read_bytes == 0


def test_the_next_piece_comes_while_one_is_used(make: Callable[..., Window]) -> None:
    window = make(Room(2, 1), Room(9, 1))
    one = Array(window.array())
    one.grow(window, 6)
    before, size = window.spill.counts.read_bytes, WIDE.block
    pieces = window.spill.pieces(one.blocks)
    assert [raw(block) for block in next(pieces)] == one.given[:1]
    assert window.spill.counts.read_bytes - before == 2 * size
    del pieces
    assert window.read(one.blocks) == one.given


def test_what_lies_together_is_one_copy(make: Callable[..., Window]) -> None:
    """Blocks from disk come to a buffer of RAM side by side, and go on as one."""
    window = make(Room(2, 4), Room(2, 4))
    one = Array(window.array())
    one.grow(window, 12)
    window.case.spill.flush()
    copies = window.device._copies
    assert window.read(one.blocks) == one.given
    assert window.device._copies - copies <= 5


def test_the_mark_of_a_buffer_is_needed(
    make: Callable[..., Window], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it a piece would be copied over one that kernels still read."""
    copy_all = FakeDevice.copy_all
    monkeypatch.setattr(
        FakeDevice,
        "copy_all",
        lambda self, pairs, after, landed: copy_all(self, pairs, FakeMark(0, 0), landed),
    )
    window = make()
    one = Array(window.array())
    one.grow(window, 9)
    with pytest.raises(AssertionError, match="still read it"):
        window.read(one.blocks)


def test_a_slot_that_is_used_before_its_copy_has_landed_is_seen(
    make: Callable[..., Window], monkeypatch: pytest.MonkeyPatch
) -> None:
    window = make(Room(2, 1), Room(9, 1), delay=0.01)
    one = Array(window.array())
    leave = window.spill._leave

    def hasty() -> None:
        leave()
        slot = window.spill._leaving[-1].slot
        assert slot is not None
        window.spill._bytes(slot).fill_(1)  # as if the next block were there already

    monkeypatch.setattr(window.spill, "_leave", hasty)
    one.grow(window, 6)
    assert window.read(one.blocks) != one.given


def test_a_failed_copy_loses_its_block_alone(make: Callable[..., Window]) -> None:
    window = make(Room(4, 1), Room(9, 1))
    lost, fine = Array(window.array()), Array(window.array())
    lost.grow(window, 1)
    window.device.fail_next(at_once=False)
    fine.grow(window, 8)  # and makes room
    window.spill._arrived()
    assert lost.lost and not fine.lost
    for act in (lambda: window.read(lost.blocks), lambda: window.spill.rows(lost.blocks[0])):
        with pytest.raises(ScratchError, match=r"A copy to or from the device failed.*reset it"):
            act()
    assert window.read(fine.blocks) == fine.given


def test_a_copy_that_is_interrupted_loses_its_block_alone(
    make: Callable[..., Window], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is asked for: it may or may not be under way."""

    def fetch(*given: Any) -> None:
        raise KeyboardInterrupt

    window = make(Room(4, 1), Room(9, 1))
    lost, fine = Array(window.array()), Array(window.array())
    lost.grow(window, 1)
    with monkeypatch.context() as patch:
        patch.setattr(window.device, "fetch", fetch)
        with pytest.raises(KeyboardInterrupt):
            fine.grow(window, 3)
    fine.grow(window, 7)
    assert lost.lost and window.read(fine.blocks) == fine.given


def test_a_device_without_the_memory_says_so(make: Callable[..., Window]) -> None:
    window = make()
    with pytest.raises(DeviceError, match="--vram"):
        DeviceSpill(window.case.spill, window.device, Room(1, 1))


def test_a_closed_window_has_nothing(make: Callable[..., Window]) -> None:
    window = make(Room(4, 1))
    one = Array(window.array())
    one.grow(window, 3)
    window.spill.close()
    assert not window.spill._views and not window.spill._memory.numel()
    with pytest.raises(ScratchError, match="closed"):
        window.spill.rows(one.blocks[0])


@pytest.mark.skipif(not interpreted(), reason="Triton is not installed")
def test_triton_s_attention_over_pieces(make: Callable[..., Window]) -> None:
    """A tile of a prompt and a decode row over blocks of all three places, against the same rows in
    one piece."""
    heads, nope, rope, v, length = 1, 24, 8, 16, 5 * LATENT_BLOCK + 70
    g, window = generator(0), make(LEAST, LEAST)
    latents = randn(g, 6 * LATENT_BLOCK, 40, dtype=torch.bfloat16)
    up = DenseWeight(randn(g, heads * (nope + v), 40 - rope, dtype=torch.bfloat16) / 8)
    q = randn(g, 70, heads, nope + rope, dtype=torch.bfloat16)
    whole = list(torch.split(latents, LATENT_BLOCK))
    array = window.array()
    blocks = [window.spill.append(array, block) for block in whole[:-1]]
    rest = (length, up, nope, v, (nope + rope) ** -0.5, Workers(1))
    queries = [Query(q[6:], length - 64)]

    def pieces() -> Iterator[list[torch.Tensor]]:
        return window.spill.pieces(blocks, whole[-1:])

    from k3offload.kernels import mla_decode_triton, mla_prefill_triton

    (want,) = mla_prefill_triton.mla_prefill(queries, [whole], *rest)
    (got,) = mla_prefill_triton.mla_prefill(queries, pieces(), *rest)
    assert same_bits(got, want)
    row = [mla_decode_triton.mla_decode(q[0], p, *rest) for p in ([whole], pieces())]
    assert all(same_bits(a, b) for a, b in zip(*row, strict=True))
    assert window.spill.counts.read_bytes and window.case.spill.counts.read_bytes

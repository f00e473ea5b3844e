"""What calls that were put off read is still there when they are made: pieces of latents, pages,
streamed layers; nothing reads their results before; an error drops them; threads do not meet."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch

from k3offload.engine import Engine
from k3offload.errors import NumericError, ScratchError
from k3offload.kernels import c_function, choose, native
from k3offload.kernels.choose import Kernels
from k3offload.kernels.latent_format import PRECISIONS, LatentFormat
from k3offload.kernels.latents_reference import pack
from k3offload.kernels.linear_reference import DenseWeight
from k3offload.kernels.workers import Workers
from k3offload.loading import load
from k3offload.model import Run
from k3offload.ring import Ring
from k3offload.scheduler.schedule import Schedule
from k3offload.scheduler.store import ExpertStore
from k3offload.state import SequenceState
from tests.contract.test_kernel import same_bits as same_tensors
from tests.helpers_engine import BRIEF, checkpoint, session_with, some_tokens, starve
from tests.helpers_spilled import damage_first_file
from tests.test_latents import TOKENS, least, small
from tests.test_mla_decode import NOPE, RANK, ROPE, SCALE, V, cut, in_blocks, make

pytestmark = pytest.mark.skipif(not native.isas(), reason="there is no native library")
FOLDER = partial(checkpoint, **BRIEF)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load(FOLDER(), sessions=8, threads=2) as made:
        yield made


def decoded(engine: Engine, lengths: Sequence[int], steps: int = 4) -> list[bytes]:
    """Logits of each step of sessions that decode together."""
    some = [session_with(engine, some_tokens(n, seed=n)) for n in lengths]
    found = []
    for token in range(steps):
        engine.advance(some)
        found += [session.logits().tobytes() for session in some]
        for session in some:
            session.append_sampled(token)
    for session in some:
        session.close()
    return found


def at_once(monkeypatch: pytest.MonkeyPatch, run: Callable[[], list[bytes]]) -> list[bytes]:
    """What ``run`` gives where nothing is put off."""
    with monkeypatch.context() as patch:
        patch.setattr(choose, "FEW_ROWS", 0)
        return run()


# ---- pieces of latents ----


@pytest.mark.parametrize("at", [[], [1], [1, 2, 3]])
@pytest.mark.parametrize("precision", [None, *PRECISIONS])
def test_pieces_are_read_before_the_next_is_asked_for(
    precision: str | None, at: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All pieces lie in the same memory, and NaN in between; so do unpacked ones."""
    monkeypatch.setattr(choose, "DECODE_ROOM", 1)
    kernels, length, dtype = Kernels(Workers(1)), 900, torch.bfloat16
    q, latents, up = make(length, dtype)
    form = LatentFormat(RANK, ROPE, dtype.itemsize, precision)
    blocks, one = in_blocks(pack(latents, form), 0), torch.ones(NOPE + ROPE)

    def attend() -> torch.Tensor:
        query = kernels.rms_norm(q, one, 1e-5)
        pieces = kernels.unpacked(cut(blocks, at), length, form, dtype, True)
        return kernels.mla_decode(query, pieces, length, DenseWeight(up), NOPE, V, SCALE)

    wanted = attend()
    with kernels.put_off(1):
        got = attend()
    assert same_tensors(got, wanted) and bool(got.isfinite().all())


@pytest.mark.parametrize("precision", [None, *PRECISIONS])
def test_spilled_latents_have_the_bits_of_calls_made_at_once(
    precision: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how: dict[str, Any] = {} if precision is None else {"latent_dtype": precision}
    with small(latents=least(**how), scratch=tmp_path, **how) as engine:
        run = partial(decoded, engine, (900, 515), 3)
        assert run() == at_once(monkeypatch, run)


def test_latents_lost_in_a_decode_step_are_those_of_one_session(tmp_path: Path) -> None:
    with small(latents=least(), scratch=tmp_path) as engine:
        alone = decoded(engine, (70,), 2)
        lost, kept = session_with(engine, TOKENS), session_with(engine, some_tokens(70, seed=70))
        engine.advance([lost, kept])
        assert kept.logits().tobytes() == alone[0]
        damage_first_file(engine, Path.unlink)
        lost.append_sampled(0)
        kept.append_sampled(0)
        failed = engine.sweep([lost, kept])
        assert isinstance(failed.pop(lost), ScratchError) and not failed
        assert kept.logits().tobytes() == alone[1]
        lost.close()
        kept.close()


def test_norms_are_given_rows_without_gaps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full tile of rows with gaps would have other bits than one that is filled up."""
    whole, norm = [], Kernels.rms_norm

    def watched(kernels: Kernels, x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
        whole.append(x.is_contiguous())
        return norm(kernels, x, weight, eps)

    monkeypatch.setattr(Kernels, "rms_norm", watched)
    decoded(engine, (70, 5), 2)
    assert whole and all(whole)


# ---- pages and streamed layers ----


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("lengths", [(70,), (70, 5, 33)])
@pytest.mark.parametrize("options", [{"cache": "40K"}, {"cache": "120K"}, {}])
def test_no_page_or_layer_leaves_before_its_calls(
    options: dict[str, Any],
    lengths: tuple[int, ...],
    asks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether the next layer is guessed, which reads results, or not."""
    left, kept, started = [], ExpertStore._unpin, Ring._start

    def unpin(store: ExpertStore, pages: Any) -> None:
        if pages:
            left.append(c_function.waiting())
        kept(store, pages)

    def start(*args: Any) -> Any:
        left.append(c_function.waiting())
        return started(*args)

    if "cache" not in options:  # layers of the trunk follow one another in one place
        starve(monkeypatch)
    monkeypatch.setattr(Schedule, "asks", lambda self: asks)
    monkeypatch.setattr(ExpertStore, "_unpin", unpin)
    monkeypatch.setattr(Ring, "_start", start)
    with load(FOLDER(), sessions=3, threads=2, **options) as engine:
        run = partial(decoded, engine, lengths)
        found = run()
        assert left and not any(left)
        assert found == at_once(monkeypatch, run)


def test_only_sweeps_of_decode_rows_wait(engine: Engine) -> None:
    seen: list[bool] = []
    watch = engine.hooks.on_route
    engine.hooks.on_route = lambda *given: seen.append(c_function._later.calls is not None)
    old, new = session_with(engine, some_tokens(5)), session_with(engine, some_tokens(3))
    try:
        for some, waits in ([old], False), ([old], True), ([old, new], False), ([old, new], True):
            engine.advance(some)
            assert seen and set(seen) == {waits}
            seen.clear()
            for session in some:
                session.append_sampled(3)
    finally:
        engine.hooks.on_route = watch
    old.close()
    new.close()


# ---- snapshots ----


def test_a_snapshot_in_a_decode_step_is_of_after_it(engine: Engine) -> None:
    state, into, kept = engine.new_state(), engine.new_state(), list[SequenceState]()
    engine.run([Run(state, some_tokens(63), 0)], lambda *given: None)
    state.mark(64, into, kept.append)
    engine.run([Run(state, [5], 1, decode=True)], lambda *given: None)
    state.settle()
    assert kept == [into]
    for layer in state.kda:
        assert same_tensors(into.kda[layer], state.kda[layer])
        assert same_tensors(into.conv[layer], state.conv[layer])


# ---- errors ----


@pytest.mark.parametrize("layer", range(5))
def test_an_error_between_layers_drops_what_waits(engine: Engine, layer: int) -> None:
    wanted = decoded(engine, (70, 5))
    some = [session_with(engine, some_tokens(20, seed=i)) for i in range(2)]
    engine.advance(some)
    for session in some:
        session.append_sampled(0)

    def stop(index: int) -> None:
        if index == layer:
            raise KeyboardInterrupt

    engine.hooks.before_layer = stop
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.advance(some)
    finally:
        engine.hooks.before_layer = lambda index: None
    assert c_function._later.calls is None
    for session in some:
        session.close()
    assert decoded(engine, (70, 5)) == wanted


def fail_behind(patch: pytest.MonkeyPatch, last: int) -> list[int]:
    """One more call behind each that is put off, which joins the list that is returned; number
    ``last`` fails."""
    made: list[int] = []

    def counted(words: int) -> int:
        made.append(words)
        return len(made) == last

    count = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(counted)
    place, called = ctypes.cast(count, ctypes.c_void_p).value, c_function.CFunction.__call__

    def call(f: c_function.CFunction, *args: Any, **rest: Any) -> None:
        called(f, *args, **rest)
        if (calls := c_function._later.calls) is not None:
            calls.words.extend([place or 0, 0])
            calls.kept.append(count)

    patch.setattr(c_function.CFunction, "__call__", call)
    return made


def test_an_error_in_a_call_makes_none_behind_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = decoded(engine, (70, 5))
    for last in range(1, 200, 7):
        some = [session_with(engine, some_tokens(20, seed=i)) for i in range(2)]
        engine.advance(some)
        for session in some:
            session.append_sampled(0)
        with monkeypatch.context() as patch:
            made = fail_behind(patch, last)
            try:
                engine.advance(some)
            except MemoryError:
                assert len(made) == last and c_function._later.calls is None
        for session in some:
            session.close()
        if len(made) < last:
            break
    else:
        raise AssertionError("a step makes more calls than that")
    assert last > 30
    assert decoded(engine, (70, 5)) == wanted


def test_a_list_that_an_interrupt_left_behind_takes_no_calls(engine: Engine) -> None:
    c_function.PutOff().__enter__()
    engine.hooks.before_layer = lambda index: seen.append(c_function._later.calls)
    seen: list[Any] = []
    try:
        with session_with(engine, some_tokens(5)) as session:
            session.logits()
    finally:
        engine.hooks.before_layer = lambda index: None
    assert seen == [None] * 5 and c_function._later.calls is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("layer", range(5))
def test_bad_numbers_in_a_decode_step_name_their_layer(
    engine: Engine, layer: int, value: float
) -> None:
    some = [session_with(engine, some_tokens(20, seed=i)) for i in range(3)]
    engine.advance(some)
    for session in some:
        session.append_sampled(0)
    with engine.weights.layer(layer) as w:
        weight = w.vector("self_attn.o_proj.weight")
    kept = weight[7].clone()
    weight[7] = value
    try:
        failed = engine.sweep(some)
    finally:
        weight[7] = kept
    for session in some:
        error = failed[session]
        assert isinstance(error, NumericError) and f"Layer {layer} " in str(error)
        session.close()


@pytest.mark.parametrize("place", range(3))
def test_bad_numbers_end_one_of_several_that_decode(engine: Engine, place: int) -> None:
    lengths = (70, 5, 33)
    wanted = decoded(engine, lengths, 2)
    some = [session_with(engine, some_tokens(n, seed=n)) for n in lengths]
    engine.advance(some)
    for session in some:
        session.append_sampled(0)
    layer = sorted(some[place].state.kda)[1]
    some[place].state.kda[layer][0, 0, 0] = float("nan")
    failed = engine.sweep(some)
    assert list(failed) == [some[place]] and f"Layer {layer} " in str(failed[some[place]])
    for i, session in enumerate(some):
        assert i == place or session.logits().tobytes() == wanted[3 + i]
        session.close()


# ---- threads ----


def test_what_one_thread_puts_off_is_no_other_s() -> None:
    kernels, x, weight = Kernels(Workers(1)), torch.ones(1, 64), torch.ones(64)
    wanted = kernels.rms_norm(x, weight, 1e-5)

    def another() -> torch.Tensor:
        at_once = kernels.rms_norm(x, weight, 1e-5)
        with kernels.put_off(1):
            assert not kernels.waiting
            kernels.rms_norm(x, weight, 1e-5)
        return at_once

    with kernels.put_off(1):
        mine = kernels.rms_norm(x, weight, 1e-5).fill_(7)
        with ThreadPoolExecutor(1) as threads:
            assert same_tensors(threads.submit(another).result(), wanted)
        assert kernels.waiting and bool(mine.eq(7).all())
        kernels.finish()
        assert same_tensors(mine, wanted)


def test_threads_that_run_engines_at_once_do_not_meet(engine: Engine) -> None:
    lengths = (70, 5)
    wanted = decoded(engine, lengths, 6)
    start = Barrier(3)

    def one(given: Engine) -> list[list[bytes]]:
        start.wait()
        return [decoded(given, lengths, 6) for _ in range(4)]

    with load(FOLDER(), sessions=8, threads=2) as second, load(FOLDER(), sessions=8) as third:
        with ThreadPoolExecutor(3) as threads:
            for found in threads.map(one, (engine, second, third)):
                assert found == [wanted] * 4

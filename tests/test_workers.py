"""Workers: every task once, errors out, and threads that are like the caller's."""

from __future__ import annotations

import threading

import pytest
import torch

from k3offload.kernels.workers import Workers, single_threaded


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 100])
def test_each_task_once(threads: int, count: int) -> None:
    workers, seen = Workers(threads), list[int]()
    workers.map(seen.append, count)
    assert sorted(seen) == list(range(count))
    workers.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_errors_come_out_and_the_workers_live_on(threads: int) -> None:
    workers = Workers(threads)

    def fail(i: int) -> None:
        if i == 7:
            raise ValueError("task 7")

    for _ in range(3):
        with pytest.raises(ValueError, match="task 7"):
            workers.map(fail, 20)
    seen: list[int] = []
    workers.map(seen.append, 20)
    assert sorted(seen) == list(range(20))
    workers.close()


def on_all_threads(workers: Workers, look: object) -> list[object]:
    """``look()`` on each thread of ``workers``."""
    meet, found = threading.Barrier(workers.threads), []

    def task(i: int) -> None:
        meet.wait(20)
        found.append(look())  # type: ignore[operator]

    workers.map(task, workers.threads)
    return found


def test_threads_share_the_callers_inference_mode() -> None:
    """Else they could not write to what the caller made (a sweep runs in inference mode)."""
    workers = Workers(3)
    assert on_all_threads(workers, torch.is_inference_mode_enabled) == [False] * 3
    with torch.inference_mode():
        assert on_all_threads(workers, torch.is_inference_mode_enabled) == [True] * 3
        out = torch.zeros(3)
        workers.map(lambda i: out[i].fill_(i), 3)  # type: ignore[arg-type]
    assert out.tolist() == [0, 1, 2]
    workers.close()


def test_torch_runs_on_one_thread_in_each() -> None:
    workers, before = Workers(3), torch.get_num_threads()
    with single_threaded():
        assert on_all_threads(workers, torch.get_num_threads) == [1] * 3
    assert torch.get_num_threads() == before
    with pytest.raises(ZeroDivisionError), single_threaded():
        raise ZeroDivisionError
    assert torch.get_num_threads() == before
    workers.close()


def test_scratch_belongs_to_its_thread_and_name() -> None:
    workers = Workers(3)

    def place(name: str = "a") -> int:
        return workers.scratch(name, (4, 5), torch.float32).data_ptr()

    places = on_all_threads(workers, place)
    assert len(set(places)) == 3
    assert place() == place() != place("b")
    workers.close()


def test_scratch_grows_and_changes_its_kind() -> None:
    workers = Workers(1)
    small = workers.scratch("a", (2, 3), torch.float32)
    assert small.shape == (2, 3)
    large = workers.scratch("a", (50, 3), torch.float32)
    assert large.shape == (50, 3)
    assert workers.scratch("a", (2, 3), torch.float32).data_ptr() == large.data_ptr()
    other = workers.scratch("a", (7,), torch.bfloat16)
    assert (other.dtype, other.shape) == (torch.bfloat16, (7,))
    assert large.data_ptr() % 64 == 0

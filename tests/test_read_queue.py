"""The order of reads: priorities, cancels, bounds and drives (R58, R62)."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from heapq import heappush

import pytest

from k3offload.errors import ReadError
from k3offload.tiers import read_queue
from k3offload.tiers.base import Cancelled, Priority, Ticket
from k3offload.tiers.read_queue import Piece, ReadQueue

DEMAND, TRUNK, PREFETCH = Priority
PATIENCE = 20.0


class Watched:
    """A queue whose pieces wait at a gate and say when they ran."""

    def __init__(
        self, readers: int = 1, in_flight: int = 1000, beside_guesses: int | None = None
    ) -> None:
        self.queue = ReadQueue(readers, in_flight, beside_guesses)
        self.ran: list[str] = []
        self.gate = threading.Event()
        self.lock = threading.Lock()
        self.now = self.most = self.bytes_now = self.most_bytes = 0

    def submit(
        self,
        names: str,
        priority: Priority,
        size: int = 1,
        drive: str = "a",
        run: Callable[[], None] = lambda: None,
    ) -> Ticket:
        """One piece for each letter of ``names``."""
        pieces = [Piece(drive, size, size, self._piece(name, size, run)) for name in names]
        return self.queue.submit(pieces, priority)

    def _piece(self, name: str, size: int, run: Callable[[], None]) -> Callable[[], None]:
        def piece() -> None:
            with self.lock:
                self.ran.append(name)
                self.now += 1
                self.bytes_now += size
                self.most = max(self.most, self.now)
                self.most_bytes = max(self.most_bytes, self.bytes_now)
            assert self.gate.wait(PATIENCE)
            with self.lock:
                self.now -= 1
                self.bytes_now -= size
            run()

        return piece

    def begun(self, count: int) -> None:
        """Wait until so many pieces have begun."""
        end = time.monotonic() + PATIENCE
        while len(self.ran) < count:
            assert time.monotonic() < end, self.ran
            time.sleep(0.001)


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.gate.set()
    made.queue.close()


def ordered(watched: Watched) -> str:
    """The order in which one reader takes what came in any order."""
    first = watched.submit("-", PREFETCH)
    watched.begun(1)
    tickets = [
        watched.submit("pq", PREFETCH),
        watched.submit("tu", TRUNK),
        watched.submit("ab", DEMAND),
        watched.submit("r", PREFETCH),
        watched.submit("c", DEMAND),
        watched.submit("v", TRUNK),
    ]
    watched.gate.set()
    for ticket in [first, *tickets]:
        ticket.wait()
    return "".join(watched.ran)


def test_demand_before_trunk_before_prefetch_and_earlier_requests_first(watched: Watched) -> None:
    assert ordered(watched) == "-abctuvpqr"


def test_planted_first_come_first_served_is_seen(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "k3offload.tiers.read_queue.heappush",
        lambda heap, item: heappush(heap, (PREFETCH, *item[1:])),
    )
    monkeypatch.setattr(
        read_queue._Entry, "priority", property(lambda self: PREFETCH, lambda self, value: None)
    )
    assert ordered(watched) == "-pqtuabrcv"


def test_a_raised_request_goes_before_later_demands(watched: Watched) -> None:
    watched.submit("-", PREFETCH)
    watched.begun(1)
    watched.submit("pq", PREFETCH)
    raised = watched.submit("rs", PREFETCH)
    watched.submit("a", DEMAND)
    raised.raise_to(DEMAND)
    raised.raise_to(TRUNK)  # never back
    raised.raise_to(DEMAND)
    last = watched.submit("x", PREFETCH)
    watched.gate.set()
    last.wait()
    assert "".join(watched.ran) == "-rsapqx"


def test_cancel_drops_what_has_not_begun(watched: Watched) -> None:
    half = watched.submit("ab", DEMAND, size=7)
    watched.begun(1)
    none, whole = watched.submit("cd", DEMAND), watched.submit("e", DEMAND)
    assert none.cancel() and none.done(), "nothing of it was under way"
    assert half.cancel() and not half.done(), "a piece of it still is"
    watched.gate.set()
    whole.wait()
    for ticket, landed in ((half, 7), (none, 0)):
        with pytest.raises(Cancelled):
            ticket.wait()
        assert ticket.landed == landed
        assert not ticket.cancel()
    assert watched.ran == ["a", "e"]


def test_cancel_of_what_has_begun_changes_nothing(watched: Watched) -> None:
    ticket = watched.submit("a", DEMAND, size=5)
    watched.begun(1)
    assert not ticket.cancel()
    watched.gate.set()
    ticket.wait()
    assert ticket.landed == 5


def test_a_failed_piece_ends_the_request_and_spares_the_others(watched: Watched) -> None:
    def fail() -> None:
        raise ReadError("made to fail")

    failing, other = watched.submit("abc", DEMAND, run=fail), watched.submit("d", DEMAND)
    watched.gate.set()
    other.wait()
    with pytest.raises(ReadError, match="made to fail"):
        failing.wait()
    assert watched.ran == ["a", "d"]


@pytest.mark.parametrize(("bound", "at_once"), [(30, 3), (39, 3), (40, 4), (5, 1)])
def test_r62_bytes_in_flight_are_bounded(bound: int, at_once: int) -> None:
    watched = Watched(readers=8, in_flight=bound)
    ticket = watched.submit("abcdefghij", DEMAND, size=10)
    watched.begun(at_once)
    time.sleep(0.02)
    watched.gate.set()
    ticket.wait()
    assert (watched.most, watched.most_bytes) == (at_once, 10 * at_once)
    watched.queue.close()


def test_a_guess_begins_only_beside_little_and_what_it_becomes_at_once() -> None:
    watched = Watched(readers=8, in_flight=60, beside_guesses=30)
    asked = watched.submit("abcd", DEMAND, size=10)
    watched.begun(4)
    guess = watched.submit("pq", PREFETCH, size=10)
    vain = watched.submit("r", PREFETCH, size=10)
    more = watched.submit("e", DEMAND, size=10)
    watched.begun(5)
    time.sleep(0.02)
    assert sorted(watched.ran) == list("abcde"), "guesses wait, what is asked for does not"
    guess.raise_to(DEMAND)
    watched.begun(6)
    time.sleep(0.02)
    assert sorted(watched.ran) == list("abcdep"), "wanted now, up to the bound of all"
    watched.gate.set()
    for ticket in (asked, more, guess, vain):
        ticket.wait()
    assert watched.most_bytes == 60 and watched.ran[-1] == "r"
    watched.queue.close()


@pytest.mark.parametrize(("beside", "at_once"), [(30, 3), (5, 1), (None, 6)])
def test_guesses_alone_keep_to_their_bound(beside: int | None, at_once: int) -> None:
    watched = Watched(readers=8, in_flight=60, beside_guesses=beside)
    ticket = watched.submit("abcdefghij", PREFETCH, size=10)
    watched.begun(at_once)
    time.sleep(0.02)
    watched.gate.set()
    ticket.wait()
    assert watched.most == at_once
    watched.queue.close()


def test_a_drive_that_hangs_does_not_hold_up_another() -> None:
    watched = Watched(readers=2)
    slow = watched.submit("abcd", DEMAND, drive="slow")
    watched.begun(2)
    ticket = watched.queue.submit([Piece("quick", 1, 1, lambda: None)] * 5, PREFETCH)
    ticket.wait()
    assert not slow.done()
    watched.gate.set()
    slow.wait()
    watched.queue.close()


def test_close_gives_up_what_waits_and_ends_what_runs() -> None:
    watched = Watched(readers=2)
    tickets = [watched.submit("ab", DEMAND), watched.submit("cd", PREFETCH)]
    watched.begun(2)
    threading.Timer(0.05, watched.gate.set).start()
    watched.queue.close()
    assert [ticket.done() for ticket in tickets] == [True, True]
    tickets[0].wait()
    with pytest.raises(Cancelled):
        tickets[1].wait()
    assert sorted(watched.ran) == ["a", "b"]
    with pytest.raises(Cancelled, match="closed"):
        watched.submit("e", DEMAND)
    watched.queue.close()


def test_many_threads_lose_no_ticket() -> None:
    """Submits, cancels and raises at once: each piece runs once or is dropped."""
    queue, ran = ReadQueue(4, 5), [0] * 4000

    def run(i: int) -> None:
        ran[i] += 1

    def work(number: int, tickets: list[tuple[Ticket, int, int]]) -> None:
        rng = random.Random(number)
        for i in range(number * 1000, number * 1000 + 1000, 5):
            count = rng.randrange(1, 6)
            pieces = [Piece(j % 2, 1, 1, lambda j=j: run(j)) for j in range(i, i + count)]  # type: ignore[misc]
            ticket = queue.submit(pieces, rng.choice(list(Priority)))
            tickets.append((ticket, i, count))
            old = rng.choice(tickets)[0]
            if rng.random() < 0.5:
                old.cancel()
            else:
                old.raise_to(DEMAND)

    tickets: list[list[tuple[Ticket, int, int]]] = [[] for _ in range(4)]
    threads = [threading.Thread(target=work, args=(n, tickets[n])) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    for ticket, first, count in [t for some in tickets for t in some]:
        assert ticket._event.wait(PATIENCE)
        times = ran[first : first + count]
        assert ticket.landed == sum(times) and max(times) <= 1
        assert (ticket.error is None) == (sum(times) == count)
    queue.close()


def test_a_request_is_queued_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more threads: the readers there are do the work; with none at all nothing is queued."""
    start = threading.Thread.start
    left = [1]

    def refuse(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[int] = []
    pieces = [Piece("a", 1, 1, partial(done.append, i)) for i in range(5)]
    queue = ReadQueue(8, 100)
    queue.submit(pieces, Priority.DEMAND).wait()
    assert sorted(done) == [0, 1, 2, 3, 4]
    other = [Piece("b", 1, 1, lambda: done.append(9))]
    with pytest.raises(RuntimeError):
        queue.submit(other, Priority.DEMAND)
    queue.close()
    assert 9 not in done

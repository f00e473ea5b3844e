"""What every tier must pass: the right bytes at the right place, honest tickets, no waiting.

Each check takes a case (a tier and pages whose bytes are known), so that planted wrong tiers show
that it can fail.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from k3offload.config import READ_ALIGN, align_up
from k3offload.tiers.base import Buffer, Cancelled, PageId, Priority, Ticket
from tests.helpers_tiers import CANARY, MAKERS, TierCase, aligned

GUARD = READ_ALIGN
PATIENCE = 20.0  #: seconds after which something waits that must not


class Slot:
    """A slot between two guards of canary bytes; itself filled with canary bytes too."""

    def __init__(self, case: TierCase, page: PageId) -> None:
        self._case, self.page = case, page
        spread = case.spread(page)
        self._memory = aligned(GUARD + align_up(spread, READ_ALIGN) + GUARD)
        self.into = self._memory[GUARD : GUARD + align_up(spread, READ_ALIGN)]

    def check(self) -> None:
        """The page's bytes are there, and no byte outside of its spread was touched."""
        for start, content in self._case.pages[self.page]:
            assert self.into[start : start + len(content)].tobytes() == content
        assert (self._memory[:GUARD] == CANARY).all()
        behind = self._memory[GUARD + self._case.spread(self.page) :]
        assert (behind == CANARY).all()


def end_of(ticket: Ticket) -> BaseException | None:
    """How ``ticket`` ended: None, or the error that every ``wait`` raises."""
    ended = threading.Event()
    ticket.then(ended.set)
    assert ended.wait(PATIENCE), "the ticket never ends"
    assert ticket.done()
    errors: list[BaseException | None] = []
    for _ in range(2):
        try:
            ticket.wait()
        except BaseException as error:
            errors.append(error)
        else:
            errors.append(None)
    assert errors[0] is errors[1]
    return errors[0]


def check_bytes(case: TierCase) -> None:
    """Each page alone."""
    for page in case.pages:
        slot = Slot(case, page)
        assert end_of(case.tier.read(page, slot.into)) is None
        slot.check()


def check_many_at_once(case: TierCase) -> None:
    """Many reads in flight, pages several times over, each into its own slot."""
    slots = [(page, Slot(case, page)) for page in list(case.pages) * 5]
    tickets = [case.tier.read(page, slot.into) for page, slot in slots]
    for ticket in tickets:
        assert end_of(ticket) is None
    for _, slot in slots:
        slot.check()


def check_done_means_there(case: TierCase) -> None:
    """When a ticket says done, to a callback or when asked, the bytes have landed."""
    faults: list[BaseException] = []
    for page in list(case.pages) * 3:
        slot = Slot(case, page)
        case.hold()
        ticket = case.tier.read(page, slot.into)
        assert not ticket.done(), "done while the tier is held"

        def look(slot: Slot = slot) -> None:
            try:
                slot.check()
            except AssertionError as error:
                faults.append(error)

        ticket.then(look)
        case.go()
        assert end_of(ticket) is None
        slot.check()
    assert not faults


def check_never_blocks(case: TierCase) -> None:
    """``read`` returns while no byte can move."""
    case.hold()
    tickets: list[Ticket] = []
    slots = [(page, Slot(case, page)) for page in list(case.pages) * 5]

    def start() -> None:
        tickets.extend(case.tier.read(page, slot.into) for page, slot in slots)

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    thread.join(PATIENCE / 10)
    blocked = thread.is_alive()
    case.go()
    thread.join(PATIENCE)
    assert not blocked, "read waits for bytes"
    assert all(end_of(ticket) is None for ticket in tickets)


def check_errors_reach_all(case: TierCase) -> None:
    """A failed read ends its ticket with the error for everyone; other pages do not notice."""
    broken = max(case.pages, key=case.spread)
    kind = case.break_page(broken)
    case.hold()
    ticket = case.tier.read(broken, Slot(case, broken).into)
    errors: list[BaseException | None] = []

    def wait() -> None:
        try:
            errors.append(end_of(ticket))
        except AssertionError as never:
            errors.append(never)

    waiters = [threading.Thread(target=wait, daemon=True) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    case.go()
    for waiter in waiters:
        waiter.join(PATIENCE)
    assert len(errors) == 3
    assert all(isinstance(error, kind) for error in errors), errors
    other = min(case.pages, key=case.spread)
    slot = Slot(case, other)
    assert end_of(case.tier.read(other, slot.into)) is None
    slot.check()


def check_priorities(case: TierCase) -> None:
    """Priorities change the order of reads, never their bytes."""
    case.hold()
    slots = [(page, Slot(case, page)) for page in list(case.pages) * 3]
    tickets = [
        case.tier.read(page, slot.into, list(Priority)[i % 3])
        for i, (page, slot) in enumerate(slots)
    ]
    for ticket in tickets[::2]:
        ticket.raise_to(Priority.DEMAND)
    case.go()
    assert all(end_of(ticket) is None for ticket in tickets)
    for _, slot in slots:
        slot.check()


def check_cancel(case: TierCase) -> None:
    """What was cancelled ends so, and only then its memory is its owner's again; what could not
    be cancelled ends well."""
    case.hold()
    slots = [Slot(case, page) for page in list(case.pages) * 5]
    tickets = [case.tier.read(slot.page, slot.into, Priority.PREFETCH) for slot in slots]
    cancelled = [ticket.cancel() for ticket in tickets]
    assert any(cancelled), "not even those far back in the queue"
    mine = [slot for slot, ticket in zip(slots, tickets, strict=True) if ticket.done()]
    for slot in mine:
        slot.into[:] = CANARY
    case.go()
    for slot, ticket, was in zip(slots, tickets, cancelled, strict=True):
        error = end_of(ticket)
        assert isinstance(error, Cancelled) if was else error is None
        assert not ticket.cancel() and ticket.error is error, "cancelled after its end"
        if not was:
            slot.check()
    for slot in slots:  # behind anything that may still be on its way
        assert end_of(case.tier.read(slot.page, Slot(case, slot.page).into)) is None
    assert all((slot.into == CANARY).all() for slot in mine)


def check_size_and_order(case: TierCase) -> None:
    """Sizes are useful bytes; the sort keys of all pages compare."""
    for page, parts in case.pages.items():
        assert case.tier.size(page) == sum(len(content) for _, content in parts)
    assert len(sorted(case.pages, key=case.tier.order)) == len(case.pages)
    assert case.tier.name


CHECKS = [
    check_bytes,
    check_many_at_once,
    check_done_means_there,
    check_never_blocks,
    check_errors_reach_all,
    check_priorities,
    check_cancel,
    check_size_and_order,
]
Check = Callable[[TierCase], None]


@pytest.fixture
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TierCase]:
    monkeypatch = pytest.MonkeyPatch()
    made = MAKERS[request.param](tmp_path, monkeypatch)
    yield made
    made.go()
    made.close()
    monkeypatch.undo()


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", MAKERS, indirect=True)
def test_tier(case: TierCase, check: Check) -> None:
    check(case)


def test_every_tier_file_has_a_maker() -> None:
    import k3offload

    for path in (Path(k3offload.__file__).parent / "tiers").glob("tier_*.py"):
        if "def read(self, page" in path.read_text("utf-8"):
            assert path.stem.removeprefix("tier_") in MAKERS, f"{path.name} has no maker"


# ---- planted wrong tiers: each wraps a right one ----


class _Wrong:
    name = "wrong"

    def __init__(self, case: TierCase) -> None:
        self.case, self.right = case, case.tier

    def read(self, page: PageId, into: Buffer, priority: Priority = Priority.DEMAND) -> Ticket:
        return self.right.read(page, into, priority)

    def order(self, page: PageId) -> object:
        return self.right.order(page)

    def size(self, page: PageId) -> int:
        return self.right.size(page)


class OneByteTooMany(_Wrong):
    def read(self, page: PageId, into: Buffer, priority: Priority = Priority.DEMAND) -> Ticket:
        end = self.case.spread(page)
        memory = into.base if end == into.size else into
        assert memory is not None
        memory[(GUARD if end == into.size else 0) + end] = 0
        return super().read(page, into, priority)


class OneByteOff(_Wrong):
    def read(self, page: PageId, into: Buffer, priority: Priority = Priority.DEMAND) -> Ticket:
        ticket, outer = super().read(page, into, priority), Ticket(1)

        def shift() -> None:
            into[1:] = into[:-1].copy()
            outer.finish(ticket.error)

        ticket.then(shift)
        return outer


class DoneTooSoon(_Wrong):
    def read(self, page: PageId, into: Buffer, priority: Priority = Priority.DEMAND) -> Ticket:
        super().read(page, into, priority)
        return Ticket(0)


class DoneBeforeTheEnd(_Wrong):
    """The ticket ends with the page, whose last byte is then put there by somebody else."""

    def read(self, page: PageId, into: Buffer, priority: Priority = Priority.DEMAND) -> Ticket:
        ticket, outer = super().read(page, into, priority), Ticket(1)
        start, content = self.case.pages[page][-1]
        last = start + len(content) - 1

        def end() -> None:
            kept, into[last] = into[last], into[last] ^ 1
            outer.finish(ticket.error)
            into[last] = kept

        ticket.then(end)
        return outer


class SwallowsErrors(_Wrong):
    def read(self, page: PageId, into: Buffer, priority: Priority = Priority.DEMAND) -> Ticket:
        ticket, outer = super().read(page, into, priority), Ticket(1)
        ticket.then(outer.finish)
        return outer


class ForgetsFailures(_Wrong):
    """A failed read never ends its ticket."""

    def read(self, page: PageId, into: Buffer, priority: Priority = Priority.DEMAND) -> Ticket:
        ticket, outer = super().read(page, into, priority), Ticket(1)
        ticket.then(lambda: outer.finish() if ticket.error is None else None)
        return outer


class Waits(_Wrong):
    def read(self, page: PageId, into: Buffer, priority: Priority = Priority.DEMAND) -> Ticket:
        ticket = super().read(page, into, priority)
        ended = threading.Event()
        ticket.then(ended.set)
        ended.wait(PATIENCE)
        return ticket


class CountsPadding(_Wrong):
    def size(self, page: PageId) -> int:
        return align_up(self.right.size(page), READ_ALIGN)


class CancelsInWords(_Wrong):
    """Says so, and lets the read end well."""

    def read(self, page: PageId, into: Buffer, priority: Priority = Priority.DEMAND) -> Ticket:
        ticket = super().read(page, into, priority)
        ticket.cancel = lambda: not ticket.done()  # type: ignore[method-assign]
        return ticket


class CancelsTooSoon(_Wrong):
    """Ends the ticket at once, while the copy goes on."""

    def read(self, page: PageId, into: Buffer, priority: Priority = Priority.DEMAND) -> Ticket:
        ticket, outer = super().read(page, into, priority), Ticket(2)

        def cancel() -> bool:
            if outer.done():
                return False
            outer.finish(Cancelled(), parts=2)
            return True

        def end() -> None:
            if not outer.done():
                outer.finish(ticket.error, parts=2)

        ticket.then(end)
        outer.cancel = cancel  # type: ignore[method-assign]
        return outer


class NeverCancels(_Wrong):
    def read(self, page: PageId, into: Buffer, priority: Priority = Priority.DEMAND) -> Ticket:
        ticket, outer = super().read(page, into, priority), Ticket(1)
        ticket.then(lambda: outer.finish(ticket.error))
        return outer


PLANTED: list[tuple[type[_Wrong], Check]] = [
    (OneByteTooMany, check_bytes),
    (OneByteOff, check_bytes),
    (OneByteOff, check_many_at_once),
    (DoneTooSoon, check_done_means_there),
    (DoneBeforeTheEnd, check_done_means_there),
    (SwallowsErrors, check_errors_reach_all),
    (ForgetsFailures, check_errors_reach_all),
    (Waits, check_never_blocks),
    (OneByteOff, check_priorities),
    (CancelsInWords, check_cancel),
    (CancelsTooSoon, check_cancel),
    (NeverCancels, check_cancel),
    (CountsPadding, check_size_and_order),
]


@pytest.mark.parametrize(("wrong", "check"), PLANTED)
@pytest.mark.parametrize("case", MAKERS, indirect=True)
def test_planted_wrong_tiers_are_refused(
    case: TierCase, wrong: type[_Wrong], check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    if wrong is ForgetsFailures:
        monkeypatch.setitem(globals(), "PATIENCE", 0.5)
    case.tier = wrong(case)
    with pytest.raises(AssertionError):
        check(case)

"""The order in which pages leave under ``--policy reuse``, at its edges."""

from __future__ import annotations

import numpy as np
import pytest

from k3offload.scheduler.reuse import OWN, RATES, USES, seen
from k3offload.scheduler.reuse_rank import LEAST, Rank
from k3offload.tiers.base import PageId


def rank() -> Rank:
    """Layer 0 has no experts, as in every K3; layer 1 holds experts 0 and 2, of which 2 is worth
    less."""
    made = Rank()
    made.go_to(1, 0.9)
    for expert in (0, 2):
        made.add(PageId(1, expert))
    made.revalue(1, np.array([3.0, 1.0, 2.0], np.float32), np.array([], np.int64))
    return made


def test_the_least_valuable_page_leaves() -> None:
    assert rank().least(lambda page: False) == PageId(1, 2)
    assert rank().least(lambda page: page.expert == 2) == PageId(1, 0)


def test_nothing_is_left_when_all_pages_are_busy() -> None:
    """Also where the first layer has no experts at all."""
    assert rank().least(lambda page: True) is None


def test_leased_pages_come_back_in_when_nothing_else_is_left() -> None:
    made = rank()
    made.revalue(1, np.array([3.0, 1.0, 2.0], np.float32), np.array([0, 2]))
    assert made.least(lambda page: False) == PageId(1, 2)
    made.revalue(1, np.array([3.0, 1.0, 2.0], np.float32), np.array([0, 2]))
    assert made.least(lambda page: True) is None
    assert made.least(lambda page: False) == PageId(1, 2), "what was busy is back"


class Plain:
    """The same order with nothing remembered: every page is looked at each time."""

    def __init__(self, layers: int) -> None:
        self.pages: set[PageId] = set()
        self.values = [dict[int, np.float32]() for _ in range(layers)]
        self.layer, self.keep, self.out = 0, 1.0, set[PageId]()

    def least(self, busy: set[PageId]) -> PageId | None:
        free = self.pages - busy
        some = free - self.out
        if free and not some:  # only pages left out are left
            self.out, some = set(), free
        return min(some, key=lambda page: (self.worth(page), page), default=None)

    def worth(self, page: PageId) -> np.float32:
        count = len(self.values)
        far = np.arange(1, count + 1, dtype=np.float32) / np.float32(count)
        decay = (np.float32(self.keep) ** far)[(page.layer - self.layer - 1) % count]
        value = self.values[page.layer].get(page.expert, LEAST)
        result: np.float32 = np.float32(value * decay)
        return result


@pytest.mark.parametrize("seed", range(8))
def test_what_is_remembered_changes_no_choice(seed: int) -> None:
    """Many equal values: of those the first page leaves."""
    rng, layers, experts = np.random.default_rng(seed), 4, 20
    made, plain = Rank(), Plain(layers)
    made.go_to(layers - 1, 1.0)  # all layers are known
    found = 0
    for turn in range(400):
        if turn % 5 == 0:
            plain.layer, plain.keep = int(rng.integers(layers)), float(rng.choice([0.7, 0.9]))
            made.go_to(plain.layer, plain.keep)
            values = rng.choice(np.array([0, 0.1, 0.2, 0.7], np.float32), experts)
            leased = np.sort(rng.choice(experts, 3, replace=False))
            pages = made.revalue(plain.layer, values, leased)
            plain.values[plain.layer] = dict(enumerate(np.maximum(values, LEAST)))
            plain.out = {page for page in pages if page in plain.pages}
        page = PageId(int(rng.integers(layers)), int(rng.integers(experts)))
        if page in plain.pages and rng.random() < 0.3:
            plain.pages.remove(page)
            made.remove(page)
        elif page not in plain.pages:
            plain.pages.add(page)
            plain.out.discard(page)
            made.add(page)
        busy = {page for page in plain.pages if rng.random() < 0.1 * (turn % 3)}
        least = made.least(busy.__contains__)
        assert least == plain.least(busy), turn
        if least is not None and rng.random() < 0.5:
            plain.pages.remove(least)
            made.remove(least)
            found += 1
    assert found > 100


def test_what_is_kept_of_an_expert_goes_towards_what_it_does() -> None:
    """As written down: x + (heard - x) * rate, in this order, of each number and expert."""
    rng = np.random.default_rng(1)
    own = rng.random((OWN, 32), np.float32)
    experts, scores = rng.permutation(32)[:7], np.array([255, 200, 128, 128, 127, 60, 0], np.uint8)
    heard = np.zeros_like(own)
    heard[: len(USES), experts[:4]] = 1
    heard[len(USES) : -1, experts] = scores * np.float32(1 / 255)
    wanted = own + (heard - own) * RATES
    wanted[-1, experts[:4]] = 1
    found, chosen = seen(own, np.full_like(own, np.nan), experts, scores)
    np.testing.assert_array_equal(found, wanted)
    assert chosen.tolist() == experts[:4].tolist()

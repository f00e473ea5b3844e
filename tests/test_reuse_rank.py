"""The order in which pages leave under ``--policy reuse``, at its edges."""

from __future__ import annotations

import numpy as np

from k3offload.scheduler.reuse_rank import Rank
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

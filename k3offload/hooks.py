"""What may watch an engine's sweeps, and stop them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from .layer_moe import OnRoute
from .scheduler.schedule import Schedule
from .tiers.base import PageId

if TYPE_CHECKING:
    from .model import Run

Floats = npt.NDArray[np.float32]
#: layer, next layer, what its router would choose by now [R, E], what ``layer``'s experts were
#: given [R, Z] float32; each None unless the predictor asks for it
OnAhead = Callable[[int, int, Floats | None, Floats | None], None]
#: layer, sublayer 0 or 1, entries [n, H] of some rows, norm, query, eps
OnMix = Callable[[int, int, Sequence[torch.Tensor], torch.Tensor, torch.Tensor, float], None]


@dataclass
class Hooks:
    """What may watch or stop a sweep: ``before_layer(l)`` may raise, or give runs an error, whose
    rows then leave the sweep before layer ``l``; ``on_sweep`` sees the runs,
    ``on_swept`` that their sweep has ended, well or not, ``on_route`` routing, ``on_ahead`` what
    the next layer's pages are guessed from, and ``on_mix``, if there is one, what the residual
    attention of each sublayer mixes.  ``on_lost`` is told of a page that could not be read, and
    raises what ends the sweep if nothing can.  Whoever watches routing may keep what it is told:
    nobody writes to it again.  ``wants``: of ``router`` and ``latent``, what
    ``on_ahead`` is to see, asked for by a predictor or not."""

    before_layer: Callable[[int], None] = lambda layer: None
    on_sweep: Callable[[Sequence[Run]], None] = lambda runs: None
    on_swept: Callable[[], None] = lambda: None
    on_route: OnRoute = lambda layer, group, experts, weights, scores: None
    on_ahead: OnAhead = lambda layer, next_layer, scores, latent: None
    on_mix: OnMix | None = None
    on_lost: Callable[[PageId], None] = lambda page: None
    wants: Collection[str] = ()

    def add(self, **watches: Callable[..., None]) -> None:
        """Let these watch too, by the names of their hooks, after those that do."""
        for name, watch in watches.items():
            first = getattr(self, name)
            alone = first is getattr(Hooks, name)  # nobody has watched so far
            setattr(self, name, watch if alone else _after(first, watch))

    def routing(self, schedule: Schedule | None) -> OnRoute | None:
        """Whom to tell of routing: ``schedule`` first, then ``on_route``; None if it is nobody."""
        watch = self.on_route
        if schedule is None:
            return None if watch is Hooks.on_route else watch
        return _after(
            lambda layer, group, experts, weights, scores: schedule.routed(
                layer, experts.numpy(), scores.numpy()
            ),
            watch,
        )


def _after(first: Callable[..., None], then: Callable[..., None]) -> Callable[..., None]:
    def both(*given: object) -> None:
        first(*given)
        then(*given)

    return both

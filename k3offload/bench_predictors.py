"""What reading ahead would be worth: predictors over a model's own routing, replayed.

The live store, schedule and policy replay each part of a trace twice for each predictor: with reads
that take no time, where only the guesses and the room count, and over a modelled disk, where some
of them come late or keep a needed page waiting.  Without a trace the model decodes a text and its
routing is recorded.  ``Watched`` listens to the predictor: of what was guessed, by rank and layer,
how much came true, and of the pages that were asked for and not there, how many had been guessed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .bench_frame import Frame, must_be
from .bench_policies import NOTHING, Room, Speeds, chosen_names, predictor_of, refuse_blind
from .config import GROUP_ROWS
from .errors import UsageError
from .registry import chosen as chosen_class
from .registry import names, short
from .scheduler.counts import Counts
from .scheduler.hints import Guess, Hints, Predictor
from .scheduler.predict_latent import fit, save_fit
from .scheduler.replay_tiers import Link, ModelTier
from .scheduler.replay_timed import Pace, replay_timed
from .tiers.base import PageId
from .trace import Trace, read_trace

CAPACITIES: Final = ("12%", "25%", "50%")
LATENT: Final = "latent"  #: the predictor that takes a fit
AT_ONCE: Final = Link(float("inf"), 0.0, GROUP_ROWS)
MEANINGS: Final = {
    "issued": "pages read ahead, by requests",
    "useful": "of these that were asked for before they left",
    "covered": "of the misses without a predictor that are gone",
    "read": "bytes, by those without a predictor",
    "useful_in_time": "the same over a modelled disk: asked for",
    "covered_in_time": "gone, late pages not counted",
    "late": "of requests that joined a read under way",
    "waited": "of the time that is waited for pages without a predictor",
    "first_useful": "of first guesses that came true",
}


def predictors(
    frame: Frame,
    parts: Sequence[Trace],
    rooms: Sequence[Room],
    chosen: Sequence[str],
    policy: str,
    speeds: Speeds,
    about: dict[str, Any],
) -> None:
    """Lines of all capacities and predictors; repeat i has part i."""
    refuse_blind(parts[0], chosen)
    first = frame.often.seed

    def measure(room: Room, name: str, seed: int) -> dict[str, Any]:
        return _figures(parts[seed - first], room.slots[0], name, policy, speeds)

    for room in rooms:
        for name in chosen:
            case = {**about, "policy": short(policy), "capacity": room.text,
                    "predictor": short(name)}  # fmt: skip
            frame.case(case, partial(measure, room, name))


def chosen_predictors(given: Sequence[str] | None, fit: str | None) -> list[str]:
    """Those that are ``given``, or all that can be made; ``fit``: the latent one with its file."""
    known = [name for name in names("scheduler", "predict") if name != NOTHING]
    some = given or [name for name in known if fit or name != LATENT]
    return chosen_names("predict", [fit if name == LATENT and fit else name for name in some], True)


def _figures(
    trace: Trace, slots: int, name: str, policy: str, speeds: Speeds
) -> dict[str, Any]:  # fmt: skip
    """Figures of one predictor over one part of the trace."""
    without, _ = _replay(trace, slots, NOTHING, policy, AT_ONCE, speeds.pace)
    alone, _ = _replay(trace, slots, NOTHING, policy, speeds.links[0], speeds.pace)
    ideal, seen = _replay(trace, slots, name, policy, AT_ONCE, speeds.pace)
    real, _ = _replay(trace, slots, name, policy, speeds.links[0], speeds.pace)
    must_be("bytes without a predictor, whatever reads take", without.bytes, alone.bytes)
    return {
        "tokens": len(trace.best), "slots": slots, "requests": ideal.requests,
        "misses_without": without.misses,
        "issued": ideal.prefetches / ideal.requests,
        "useful": _share(ideal.useful, ideal.prefetches),
        "covered": _share(without.misses - ideal.misses - ideal.late, without.misses),
        "read": _share(ideal.bytes, without.bytes),
        "useful_in_time": _share(real.useful, real.prefetches),
        "covered_in_time": _share(without.misses - real.misses - real.late, without.misses),
        "late": real.late / real.requests,
        "waited": _share(real.wait_seconds, alone.wait_seconds),
        "waited_seconds": real.wait_seconds, "waited_seconds_without": alone.wait_seconds,
        "bytes": real.bytes, "bytes_without": without.bytes, **seen.figures(),
    }  # fmt: skip


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _replay(
    trace: Trace, slots: int, name: str, policy: str, link: Link, pace: Pace
) -> tuple[Counts, Watched]:
    watched = Watched(predictor_of(name, trace), trace.layers.tolist(), trace.top_k)
    counts = replay_timed(
        trace.leases(), chosen_class("policy", policy)(slots), watched,
        slots, ModelTier(trace.page_bytes, link), guessed=trace.guessed, pace=pace,
    )  # fmt: skip
    return counts, watched


class Watched:
    """A predictor, and how its guesses came true.

    A page counts as wanted if it was asked for and was not there when it was guessed, or when its
    layer's requests were known.  Ranks from ``top_k`` on count as one.
    """

    def __init__(self, inner: Predictor, layers: Sequence[int], top_k: int) -> None:
        self.inner, self._place = inner, {layer: i for i, layer in enumerate(layers)}
        self.asks_router, self.asks_latent = inner.asks_router, inner.asks_latent
        self.tried = getattr(inner, "tried", False)
        shape = (len(layers), top_k + 1)
        self.guessed, self.right = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.wanted = np.zeros(len(layers), np.int64)
        self._open: dict[int, dict[int, int]] = {}  # layer -> expert -> rank
        self._absent: Callable[[PageId], bool] = lambda page: True

    def guess(self, layer: int, hints: Hints) -> list[Guess]:
        found = self.inner.guess(layer, hints)
        self._absent = hints.absent
        for page, _ in found:
            of_layer = self._open.setdefault(page.layer, {})
            of_layer.setdefault(page.expert, min(len(of_layer), self.guessed.shape[1] - 1))
        return found

    def learn(self, layer: int, experts: npt.NDArray[np.integer[Any]]) -> None:
        named, place = self._open.pop(layer, {}), self._place[layer]
        chosen = set(experts.ravel().tolist())
        for expert, rank in named.items():
            self.guessed[place, rank] += 1
            self.right[place, rank] += expert in chosen
        for expert in chosen:
            self.wanted[place] += expert in named or self._absent(PageId(layer, expert))
        self.inner.learn(layer, experts)

    def figures(self) -> dict[str, Any]:
        """Shares by layer, in the order of layers, and by rank, the first guess first; covered by
        rank: by guesses up to this one."""
        right, guessed = self.right, self.guessed
        by_rank = right.sum(0) / np.maximum(guessed.sum(0), 1)
        return {
            "first_useful": float(by_rank[0]),
            "guesses_by_rank": guessed.sum(0).tolist(),
            "useful_by_rank": by_rank.tolist(),
            "covered_by_rank": (right.sum(0).cumsum() / max(1, int(self.wanted.sum()))).tolist(),
            "useful_by_layer": (right.sum(1) / np.maximum(guessed.sum(1), 1)).tolist(),
            "covered_by_layer": (right.sum(1) / np.maximum(self.wanted, 1)).tolist(),
        }


def equal_parts(trace: Trace, count: int) -> list[Trace]:
    """``count`` runs of tokens of one length, one after another; what is left over is left out.
    Raises ``UsageError`` where there are fewer tokens."""
    size = len(trace.best) // count
    if not size:
        raise UsageError(
            f"The trace has {len(trace.best)} tokens and cannot be cut into {count} parts.",
            "Ask for fewer --repeats.",
        )
    return [trace.rows(slice(i * size, (i + 1) * size)) for i in range(count)]


@contextmanager
def fitted(trace: Path | None) -> Iterator[str | None]:
    """The latent predictor with a fit from ``trace``, as it is named; None without one."""
    if trace is None:
        yield None
        return
    seen = read_trace(trace, ["latent"])
    if "latent" not in seen.more:
        raise UsageError(f"{trace} holds no latents.", "Record it with --trace-with latent.")
    with tempfile.TemporaryDirectory(prefix="k3-fit-") as folder:
        place = str(Path(folder) / "fit.npz")
        save_fit(place, fit(seen.layers.tolist(), seen.more["latent"], seen.dense()))
        yield f"{LATENT}={place}"

"""What a turn of a growing conversation costs: state kept, prefixes shared, or all computed again.

Three ways answer the same turns side by side, in one engine:

* ``live``: one session goes on; it computes the user's tokens and its own reply's last one;
* ``shared``: a new session each turn, as a server has it; it starts from the longest kept prefix;
* ``cold``: a new session each turn, nothing kept.

``shared`` and ``cold`` give the same bits, which is checked.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .budget import state_bytes
from .damage import held_out_text
from .engine import Engine
from .errors import K3Error, UsageError
from .loading import open_engine
from .session import Session
from .spec import ModelSpec
from .tokenizer import Tokenizer

WAYS: Final = ("live", "shared", "cold")


@dataclass(frozen=True)
class Turn:
    """One turn; seconds, tokens and bytes of the ways by name."""

    context: int  #: tokens before the reply
    first_token: dict[str, float]  #: seconds from the user's tokens to the first of the reply
    computed: dict[str, int]  #: tokens that were prefilled for it
    expert_bytes: dict[str, int]  #: bytes of experts asked for, wherever they lay
    save_seconds: float  #: of ``Session.save`` of the live session, into one folder
    save_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__}


def append(
    model: str | Path,
    *,
    turns: int = 8,
    user: int = 200,
    reply: int = 16,
    text: str | None = None,
    show: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> list[Turn]:
    """Measure ``turns`` turns of ``user`` tokens of ``text`` and ``reply`` greedy tokens.

    ``options`` are those of ``load`` but for sizes.  Raises ``UsageError`` for a text that is too
    short, and whatever loading raises.
    """
    words = held_out_text() if text is None else text
    ids: list[int] = []
    context, dtype = turns * (user + reply), options.get("dtype") or "bfloat16"

    def sizes(tokenizer: Tokenizer, spec: ModelSpec) -> dict[str, int]:
        ids[:] = tokenizer.encode(words)
        if len(ids) < turns * user:
            raise UsageError(
                f"The text has {len(ids):,} tokens and {turns} turns of {user} are wanted.",
                "Give a longer text, or fewer or shorter turns.",
            )
        spec.check_context(context)
        snapshots = 3 * state_bytes(spec, dtype, context, options.get("latent_dtype"))
        return {"context": context, "sessions": 2, "prefix_cache": snapshots}

    with (
        tempfile.TemporaryDirectory(prefix="k3offload-") as folder,
        open_engine(model, sizes, **options) as engine,
        engine.session() as live,
    ):
        place = Path(folder) / "session"
        return [
            _turn(engine, live, ids[i * user : (i + 1) * user], reply, place, show)
            for i in range(turns)
        ]


def _turn(
    engine: Engine,
    live: Session,
    more: Sequence[int],
    reply: int,
    folder: Path,
    show: Callable[[str], None],
) -> Turn:
    """One turn all three ways; then the live session replies."""
    history = [*live.tokens, *more]
    show(f"{len(history):,} tokens")
    first: dict[str, float] = {}
    computed: dict[str, int] = {}
    asked: dict[str, int] = {}
    rows: dict[str, npt.NDArray[np.float32]] = {}
    assert engine.prefixes is not None
    for way in ("shared", "cold", "live"):
        if way == "cold" or not live.length:
            engine.prefixes.clear()  # what it leaves itself is the next turn's "shared"
        session = live if way == "live" else engine.session()
        before, begin = _asked(engine), time.perf_counter()
        session.append(more if way == "live" else history)
        known = session.position
        rows[way] = session.logits()
        rows[way].argmax()
        first[way] = time.perf_counter() - begin
        computed[way] = len(history) - max(known, session.reused)
        asked[way] = _asked(engine) - before
        if way != "live":
            session.close()
    if not (rows["shared"].view(np.uint32) == rows["cold"].view(np.uint32)).all():
        raise K3Error("A shared prefix gave other bits than a cold run.", "Please report this.")
    for _ in range(reply):
        live.append_sampled(int(live.logits().argmax()))
    begin = time.perf_counter()
    written = live.save(folder)
    return Turn(len(history), first, computed, asked, time.perf_counter() - begin, written)


def _asked(engine: Engine) -> int:
    return engine.counts()["experts"].requests * engine.plan.slot_bytes

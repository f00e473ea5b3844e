"""What happens to engines whose latents spill, wherever they lie."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from k3offload.engine import Engine
from tests.helpers_engine import Logits, session_with


def fork_story(engine: Engine, tokens: list[int]) -> list[Logits]:
    """A copy, a copy of it, going back: the logits on the way.  ``tokens``: 1,000 or more."""
    got = []
    with session_with(engine, tokens[:900]) as first:
        got.append(first.logits()[None])
        snapshot = first.snapshot()
        second = first.fork()
        second.append(tokens[900:])
        first.append(tokens[100:700])
        got += [second.logits()[None], first.logits()[None]]
        first.rewind(snapshot)
        del snapshot
        first.append(tokens[900:])
        got.append(first.logits()[None])
    second.append([5])
    got.append(second.logits()[None])
    second.close()
    return got


def damage_first_file(engine: Engine, damage: Callable[[Path], None]) -> Path:
    """Do ``damage`` to a scratch file of the first latents, once everything has been written."""
    assert engine.spilling is not None and engine.spilling.latents is not None
    engine.spilling.latents.flush()
    (path, *_) = sorted(engine.spilling.scratch.folder.rglob("0.0"))
    for number in list(engine.disk._handles):  # what is open stays readable
        os.close(engine.disk._handles.pop(number)[0])
    damage(path)
    return path

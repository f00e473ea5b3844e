"""Engines and checkpoints for tests of the whole path: made once, run in every way there is.

Checkpoints live until the process ends.  Nothing here is a stand-in: the engines are real, and a
plan is made small by the planner itself.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import k3offload.engine_plan
from k3offload import cli
from k3offload.checkpoint import Checkpoint
from k3offload.engine import Engine
from k3offload.errors import DoesNotFit
from k3offload.generate import Event, Loop, Request, Token
from k3offload.loading import load
from k3offload.make_tiny import make_tiny
from k3offload.model import Run
from k3offload.run_logits import spans
from k3offload.sampling import Sampling
from k3offload.scheduler.plan import Demand, Limits, Plan, make_plan
from k3offload.session import Session
from k3offload.tiers.device_fake import FakeDevice
from tests.oracle import Oracle, Result

Logits = NDArray[np.float32]
_ROOT: Final = TemporaryDirectory(prefix="k3-engine-")
#: nano without its largest parts: three kinds of layer, quick to make and to run
BRIEF: Final[dict[str, Any]] = {"layers": 5, "vision": False}


@cache
def _made(size: str, seed: int, overrides: tuple[tuple[str, Any], ...]) -> Path:
    folder = Path(_ROOT.name) / str(abs(hash((size, seed, overrides))))
    make_tiny(folder, size, seed, **dict(overrides))
    return folder


def checkpoint(size: str = "nano", seed: int = 0, **overrides: Any) -> Path:
    """The synthetic checkpoint of these arguments; not to be written to."""
    return _made(size, seed, tuple(sorted(overrides.items())))


@cache
def _expected(folder: Path, tokens: tuple[int, ...]) -> Result:
    return Oracle(folder).run(tokens)


def expected(folder: Path, tokens: Sequence[int]) -> Result:
    """What the float64 reference says about ``tokens``; computed once."""
    return _expected(folder, tuple(tokens))


def some_tokens(count: int, seed: int = 0, vocab: int = 256) -> list[int]:
    """``count`` token ids below ``vocab``."""
    drawn = np.random.default_rng(seed).integers(0, vocab, count)
    return [int(t) for t in drawn]


def logits_of(
    engine: Engine,
    tokens: Sequence[int],
    sweep: int = 512,
    decode_from: int | None = None,
    keep: int | None = None,
) -> Logits:
    """[T, V] (or the last ``keep`` rows) of a sequence of its own, cut into sweeps as told."""
    rows: list[Logits] = []
    state = engine.new_state()
    first = 0 if keep is None else len(tokens) - keep
    sweep = min(sweep, engine.plan.sweep_rows)
    for begin, end, decode in spans(len(tokens), sweep, decode_from):
        run = Run(state, tokens[begin:end], max(0, end - max(begin, first)), decode)
        engine.run([run], lambda i, position, row: rows.append(row.numpy().copy()))
        if run.error is not None:
            raise run.error
    return np.concatenate(rows)


def with_companions(
    engine: Engine, tokens: Sequence[int], others: Sequence[Sequence[int]], place: int = 0
) -> Logits:
    """[T, V] of ``tokens`` in one sweep with ``others``, as run number ``place`` of it."""
    runs = [Run(engine.new_state(), other, len(other)) for other in others]
    runs.insert(place, Run(engine.new_state(), tokens, len(tokens)))
    rows: list[Logits] = []

    def emit(i: int, position: int, row: torch.Tensor) -> None:
        if i == place:
            rows.append(row.numpy().copy())

    engine.run(runs, emit)
    return np.concatenate(rows)


def same_bits(a: Logits, b: Logits) -> bool:
    """Whether two float32 arrays are equal bit for bit."""
    return a.shape == b.shape and bool((a.view(np.uint32) == b.view(np.uint32)).all())


def greedy(engine: Engine, prompt: Sequence[int], count: int) -> list[int]:
    """``count`` tokens of greedy decoding, prompt as one prefill, then decode runs."""
    tokens = []
    with engine.session() as session:
        session.append(list(prompt))
        for _ in range(count):
            tokens.append(int(session.logits().argmax()))
            session.append_sampled(tokens[-1])
    return tokens


def session_with(engine: Engine, tokens: Sequence[int]) -> Session:
    """A session that holds ``tokens``, nothing computed yet."""
    session = engine.session()
    session.append(list(tokens))
    return session


def least(demand: Demand, limits: Limits) -> int:
    """Bytes of the smallest plan, as the planner itself says."""
    with pytest.raises(DoesNotFit) as refusal:
        make_plan(demand, dataclasses.replace(limits, total=0))
    return refusal.value.missing


def starve(monkeypatch: pytest.MonkeyPatch, extra: int = 0) -> None:
    """Let engines loaded from now on plan with ``extra`` bytes more than the least they need.

    A tiny model is small beside the interpreter, so no round ``ram`` would make its trunk stream.
    """

    def tight(demand: Demand, limits: Limits) -> Plan:
        total = least(demand, limits) + extra
        return make_plan(demand, dataclasses.replace(limits, total=total))

    monkeypatch.setattr(k3offload.engine_plan, "make_plan", tight)


def least_vram(folder: Path | str, **given: Any) -> int:
    """Bytes of the smallest plan of a device, as the planner itself says."""
    with pytest.raises(DoesNotFit) as refusal:
        load(folder, device=FakeDevice(1 << 30), vram=0, **given)
    return refusal.value.missing


def gone_on(
    engine: Engine, prompt: str, sampling: Sampling, count: int, left: int
) -> tuple[str, list[Event]]:
    """An answer of ``count`` tokens that is left after ``left`` of them and gone on with, as a
    batch does after a kill: the text of those, and the events that follow."""
    with engine.session() as session:
        session.append(prompt)
        sampled = (e for e in session.generate(count, sampling) if isinstance(e, Token))
        made = tuple(e.token for e in itertools.islice(sampled, left))
        loop, events = Loop(engine), list[Event]()
        said = loop.add(0, Request(session, count, sampling, made))
        while len(loop):
            events += loop.step()
    return said, events


def expert_bytes(folder: Path) -> int:
    """Bytes of one expert page on disk."""
    return Checkpoint.open(folder).expert_bytes


def call(arguments: list[Any], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command in this process."""
    with pytest.raises(SystemExit) as leave:
        cli.main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    assert isinstance(leave.value.code, int)
    return leave.value.code, out, err

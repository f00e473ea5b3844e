"""``load``: a model folder and a memory budget become an ``Engine`` that sessions share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch

from .budget import demand_of
from .checkpoint import Checkpoint
from .config import parse_size
from .errors import K3Error, SessionError, UsageError
from .find import find_model
from .kernels.workers import Workers
from .machine import Machine, default_threads, read_machine, steady_allocator, trim_allocator
from .model import Hooks, Model, Run
from .scheduler.plan import Limits, Plan, make_plan
from .scheduler.policy_lru import Policy
from .scheduler.store import Counts, ExpertStore
from .scheduler.sweep import cut
from .session import Session
from .spec import ModelSpec
from .state import Ledger, SequenceState
from .tiers.base import PageId
from .tiers.tier_disk import DiskTier
from .tiers.tier_ram import Slab
from .tokenizer import Tokenizer
from .warmup import warm_up
from .weights import Weights

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Options:
    """How to load.  Sizes are bytes; ``ram`` None means most of what is free now."""

    ram: int | None = None
    cache: int | None = None
    dtype: str = "bfloat16"
    context: int = 4096
    sessions: int = 1
    sweep: int = 512
    threads: int = field(default_factory=default_threads)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UsageError(f"dtype {self.dtype!r} is not known.", f"Use {' or '.join(DTYPES)}.")
        for name in ("context", "sessions", "sweep", "threads"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}.", "It must be at least 1.")


@dataclass(frozen=True)
class Watch:
    """Who is told what: the plan before anything is loaded, loading, layers, warnings."""

    plan: Callable[[Plan], None] = lambda plan: None
    loading: Callable[[int, int], None] = lambda done, total: None
    layer: Callable[[int, int], None] = lambda layer, layers: None
    warn: Callable[[str], None] = lambda text: None


def load(
    path: str | Path,
    *,
    ram: str | int | None = None,
    cache: str | int | None = None,
    dtype: str = "bfloat16",
    context: int = 4096,
    sessions: int = 1,
    sweep: int = 512,
    threads: int | None = None,
    watch: Watch | None = None,
) -> Engine:
    """Open the model in folder ``path`` (or ``"nano"``, the one that comes with the package).

    ``ram``: bytes this process may use in all (``"16G"`` = 16e9); ``cache``: cap on the part of it
    that holds routed experts; ``dtype``: of the activations; ``context``: tokens a session may
    reach; ``sessions``: how many sequence states (sessions and snapshots) to reserve for;
    ``sweep``: most prompt tokens in one pass.  None but ``dtype`` changes a bit of the results, as
    long as ``sweep`` is a multiple of 64.

    Raises ``ConfigError``, ``CheckpointError``, ``TokenizerError``, or ``DoesNotFit`` with the
    missing bytes, before any weight is read.
    """
    sizes = {"context": context, "sessions": sessions, "sweep": sweep}
    return open_engine(
        path, lambda _: sizes, ram=ram, cache=cache, dtype=dtype, threads=threads, watch=watch
    )


def open_engine(
    path: str | Path,
    sizes: Callable[[Tokenizer], dict[str, int]],
    *,
    ram: str | int | None = None,
    cache: str | int | None = None,
    dtype: str = "bfloat16",
    threads: int | None = None,
    watch: Watch | None = None,
) -> Engine:
    """``load`` for callers who know ``context``, ``sessions`` and ``sweep`` only once they can
    count tokens: ``sizes`` gets the tokenizer, before any memory is planned."""
    folder = find_model(path)
    checkpoint = Checkpoint.open(folder)
    tokenizer = Tokenizer.load(folder, checkpoint.spec)
    options = Options(
        ram=None if ram is None else parse_size(ram),
        cache=None if cache is None else parse_size(cache),
        dtype=dtype,
        threads=default_threads() if threads is None else threads,
        **sizes(tokenizer),
    )
    return Engine(checkpoint, tokenizer, options, watch or Watch())


def limits_of(machine: Machine, options: Options) -> Limits:
    """The smallest of the user's budget and what the machine allows, with a note if it differs."""
    allowed = int(machine.ceiling * 0.95)
    notes: tuple[str, ...] = ()
    if options.ram is None:
        total = int(machine.ceiling * 0.9)
    elif options.ram > allowed:
        total = allowed
        notes = (
            f"--ram {options.ram:,} is more than the {allowed:,} bytes that are free for this "
            "process now (physical memory and control group); the plan uses the latter.",
        )
    else:
        total = options.ram
    return Limits(total, options.cache, options.sweep, notes)


class Engine:
    """Loaded weights with tiers and store, shared by sessions.  Close it, or use ``with``."""

    def __init__(
        self, checkpoint: Checkpoint, tokenizer: Tokenizer, options: Options, watch: Watch
    ) -> None:
        self.spec: ModelSpec = checkpoint.spec
        self.tokenizer = tokenizer
        self.options = options
        self.hooks = Hooks()
        self._watch = watch
        self._lock = threading.RLock()
        self._closed = False
        steady_allocator()
        self._workers = Workers(options.threads)
        dtype = DTYPES[options.dtype]
        warm_up(self._workers, dtype)
        trim_allocator()
        machine = read_machine()
        demand = demand_of(
            checkpoint,
            dtype,
            base=machine.rss,
            threads=options.threads,
            context=options.context,
            sessions=options.sessions,
        )
        self.plan = make_plan(demand, limits_of(machine, options))
        watch.plan(self.plan)
        self.disk = DiskTier(
            checkpoint.files, lambda page: checkpoint.expert(*page).extents, watch.warn
        )
        self.weights = Weights(checkpoint, self.disk, self.plan)
        self.weights.load(watch.loading)
        self.store: ExpertStore | None = None
        if self.plan.slots:
            slab = Slab(self.plan.slots * self.plan.slot_bytes)
            self.store = ExpertStore(self.disk, slab.slots(self.plan.slot_bytes), Policy())
        self._ledger = Ledger(self.plan.state_bytes, self.plan.limit - self.plan.total)
        self._dtype = dtype
        self._model = Model(self.weights, self.store, self._workers, dtype)

    # ---- sessions ----

    def session(self) -> Session:
        """An empty session.  Raises ``DoesNotFit`` if its state has no room in the plan."""
        self._open()
        return Session(self)

    def new_state(self) -> SequenceState:
        return SequenceState(self.spec, self._dtype, self._ledger)

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; spellings of special tokens are ordinary text."""
        return self.tokenizer.encode(text)

    def check_context(self, tokens: int) -> None:
        """Raise ``UsageError`` if a session of ``tokens`` tokens is longer than allowed."""
        limit = min(self.options.context, self.spec.context)
        if tokens > limit:
            raise UsageError(
                f"{tokens:,} tokens (prompt and answer) are more than the context of {limit:,}.",
                "Shorten the prompt, ask for fewer tokens, or load with a larger context.",
            )

    # ---- work ----

    def advance(self, sessions: Sequence[Session]) -> None:
        """Compute everything that waits in ``sessions``, together in shared sweeps.

        Raises the ``NumericError`` of the first session whose numbers failed.
        """
        for session in sessions:
            if not session.tokens:
                raise SessionError("The session has no tokens.", "Append a prompt first.")
        while waiting := [s for s in sessions if s.needs_work]:
            for error in self.sweep(waiting).values():
                raise error

    def sweep(self, sessions: Sequence[Session]) -> dict[Session, K3Error]:
        """One pass over all layers for the next waiting tokens of ``sessions``.

        Decode tokens always ride along; prompts share what the plan's sweep has left, in order.
        Returns the sessions that failed with their errors.
        """
        budget = self.plan.sweep_rows
        runs: list[Run] = []
        taken: list[Session] = []
        for session in sorted(sessions, key=lambda s: not s.decoding):
            waiting = session.waiting()
            self.check_context(len(session.tokens))
            if not waiting or budget <= 0:
                continue
            count = cut(session.position, len(waiting), budget)
            if not count:
                continue  # what is left of the budget would split a chunk: next sweep
            runs.append(Run(session.state, waiting[:count], 1, session.decoding))
            taken.append(session)
            budget -= count
        self.run(runs, lambda i, position, row: taken[i].keep_logits(row[0].numpy().copy()))
        return {s: r.error for s, r in zip(taken, runs, strict=True) if r.error is not None}

    def run(self, runs: Sequence[Run], emit: Callable[[int, int, torch.Tensor], None]) -> None:
        """One sweep over ``runs`` as they are; the lowest call that still knows sequences."""
        self._open()
        layers = len(self.spec.layers)

        def before_layer(layer: int) -> None:
            self.hooks.before_layer(layer)
            self._watch.layer(layer, layers)

        with self._lock:
            self._model.sweep(runs, emit, Hooks(before_layer, self.hooks.on_route))

    # ---- accounts ----

    def counts(self) -> dict[str, Counts]:
        """Requests so far: ``experts`` (RAM slots over disk) and ``trunk`` (layers over disk)."""
        experts = self.store.counts.copy() if self.store else Counts()
        return {"experts": experts, "trunk": self.weights.counts.copy()}

    def holds(self, page: PageId) -> bool:
        """Whether an expert lies in RAM now."""
        return self.store is not None and self.store.has(page)

    def _open(self) -> None:
        if self._closed:
            raise SessionError("This engine is closed.", "Load the model again.")

    def close(self) -> None:
        """Stop the threads and close the files.  Closing twice is fine."""
        if not self._closed:
            self._closed = True
            self._workers.close()
            self.disk.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

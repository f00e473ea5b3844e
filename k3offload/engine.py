"""The engine: loaded weights under a memory plan, and the sweeps that sessions share."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from .accelerator import Accelerator, for_cpu
from .batch import Batch, OnError, Order
from .batch_results import Tally
from .budget import latent_form
from .checkpoint import Checkpoint
from .documents import Document
from .engine_plan import plan_engine
from .errors import K3Error, SessionError, TooLong, UsageError
from .hooks import Hooks
from .kernels.choose import Kernels
from .kernels.workers import Workers
from .latents import HomeOf, Ledger
from .layer_moe import Side
from .machine import steady_allocator
from .model import Model, Run, Sides
from .open_device import open_device
from .options import PREFIX_DISK, Options, Watch
from .precision import choose_precision
from .prefix_folder import PrefixFolder, prefix_place
from .prefixes import Prefixes
from .registry import chosen
from .router_codes import told
from .sampling import Sampling
from .scheduler.counts import Counts
from .scheduler.schedule import Schedule, predictor_named
from .scheduler.store import ExpertStore
from .session import Session
from .session_load import load_session
from .spec import ModelSpec
from .spilling import Spilling
from .state import SequenceState
from .tiers.base import PageId
from .tiers.device import Device
from .tiers.tier_disk import DiskTier
from .tiers.tier_ram import Slab
from .tokenizer import Tokenizer
from .turns import Turns
from .warmup import warm_up
from .weights import Weights

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Engine:
    """Loaded weights with tiers and store, shared by sessions.  Close it, or use ``with``."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer,
        options: Options,
        watch: Watch,
        device: str | Device = "auto",
    ) -> None:
        self.checkpoint = checkpoint
        self.spec: ModelSpec = checkpoint.spec
        self.tokenizer = tokenizer
        self.options = options
        self.hooks = Hooks()
        self.closing: list[Callable[[], None]] = []  # called when it is closed
        self._watch, self.warn = watch, watch.warn
        self.lock = threading.RLock()
        self._closed = False
        self._turns = Turns(self)
        self._dtype = DTYPES[options.dtype]
        self.latent_form = latent_form(self.spec, options.dtype, options.latent_dtype)
        steady_allocator()
        self._workers = Workers(options.threads)
        opened, self.device_line = open_device(device)
        self.any_device = device == "auto"
        if opened is None and (inert := options.of_a_device()):
            if device == "cpu":
                raise UsageError(f"{inert} is about a GPU.", "Leave it out, or --device cpu.")
            watch.warn(f"{inert} has no effect: {self.device_line}")
        wanted = options.kernels if opened is None else for_cpu(options.kernels)
        self.kernels = Kernels(self._workers, wanted, options.isa)
        self.accelerator: Accelerator | None = None
        if opened is not None:
            self.accelerator = Accelerator.over(
                opened, checkpoint, options, self.kernels, watch.warn
            )
        self.disk = DiskTier(
            checkpoint.files, lambda page: checkpoint.expert(*page).extents, watch.warn
        )
        self.spilling: Spilling | None = None  # where not all latents have room in RAM
        try:
            with self.blamed():
                self._load(checkpoint)
        except BaseException:
            self.close()
            raise

    def _load(self, checkpoint: Checkpoint) -> None:
        """Measure, plan, say the plan, and claim what it says."""
        options = self.options
        self._predictor = self._make_predictor()  # may read a file, and refuse it
        if options.prefix_dir is not None:
            prefix_place(options.prefix_dir, checkpoint.folder)
        warm_up(self.kernels, self._dtype)
        self.trunk = choose_precision(options.trunk, checkpoint.spec.trunk_precision)
        self.plan, there = plan_engine(self, checkpoint)
        self._watch.plan(self.plan)
        if self.plan.spills:
            self.spilling = Spilling(
                self.spec, self._dtype, self.plan, options.scratch, self.disk, self._watch.warn,
                options.latent_dtype,
            )  # fmt: skip
        streamed = len(self.spec.layers) - len(self.plan.resident_layers)
        if streamed and self.trunk != checkpoint.spec.trunk_precision:
            self._watch.warn(
                f"{streamed} layers stream and are quantised anew in every sweep; k3offload pack "
                f"MODEL OUT --trunk {self.trunk} does it once, and less is read."
            )
        elsewhere = there.elsewhere if there else frozenset()
        self.weights = Weights(
            checkpoint, self.disk, self.plan, self.trunk, self._workers, elsewhere
        )
        self.weights.load(self._watch.loading)
        if there is not None:
            there.compile(self.weights, self._watch.compiling)
            there.load_trunk(self.weights)
            if self.spilling is not None and self.spilling.latents is not None:
                there.load_latents(self.spilling.latents)
        self.store: ExpertStore | None = None
        if self.plan.slots:
            slab = Slab(self.plan.slots * self.plan.slot_bytes)
            policy = chosen("policy", options.policy)(self.plan.slots)
            self.disk.look = self.weights.arrived
            self.store = ExpertStore(self.disk, slab.slots(self.plan.slot_bytes), policy)
            if there is not None:
                rows = self.plan.sweep_rows
                there.load_experts(self.weights, self.store, slab.bytes, self.disk, rows)
        self._ledger = Ledger(self.plan.state_bytes, self.plan.limit - self.plan.total)
        self.prefixes = self._prefixes(self.plan.prefixes)
        self._counts = {
            "experts": self.store.counts if self.store else Counts(),
            "trunk": self.weights.counts,
            "head": self.weights.head_counts,
            "embedding": self.weights.embed_counts,
        }
        self._build(there)

    def _build(self, there: Accelerator | None) -> None:
        """The model over what was loaded."""
        store, here = self.store, Side(self.kernels, torch.device("cpu"))
        if there is None:
            sides = Sides((here,) * len(self.spec.layers), here, here, (self.kernels,))
            summaries = None if self.spilling is None else self.spilling.summaries
            self._model = Model(
                self.weights, store, sides, self._dtype, self._schedule(store), summaries
            )
            return
        self._counts["trunk on the device"] = there.trunk.counts
        self._counts["head on the device"] = there.trunk.head_counts
        if there.store is not None:
            store = there.store
            self._counts["experts on the device"] = store.counts
        schedule = self._schedule(store)
        self._model = Model(
            there.trunk, there.adaptive or store, there.sides(), self._dtype, schedule
        )

    def _prefixes(self, size: int) -> Prefixes | None:
        """The store of shared snapshots, where ``size`` bytes are given to it."""
        below, options = None, self.options
        if options.prefix_dir is not None:
            below = PrefixFolder(self, options.prefix_dir, options.prefix_disk or PREFIX_DISK)
        if not size:
            return None
        return Prefixes(size, lambda ledger: self._empty(ledger, True), below, options.keeps_ends)

    def _empty(self, ledger: Ledger, shared: bool = False) -> SequenceState:
        """An empty state; one that is ``shared`` by sessions of a device lies in RAM."""
        homes: HomeOf | None = None
        if self.accelerator is not None:
            homes = self.accelerator.homes(ledger, shared)
        elif self.spilling is not None:
            homes = self.spilling.homes(ledger)
        return SequenceState(self.spec, self._dtype, ledger, homes, self.options.latent_dtype)

    def _schedule(self, store: ExpertStore | None) -> Schedule | None:
        """Look-ahead, where experts are missing at all."""
        moe = self.spec.moe
        if store is None or moe is None or store.slots >= self.plan.experts:
            return None
        return Schedule(store, self._predictor, moe.top_k, code=told)

    def _make_predictor(self) -> Any:
        moe = self.spec.moe
        made, path = predictor_named(self.options.predict)
        known = {} if path is None else {"path": path}
        return None if moe is None else made(self.spec.moe_layers, moe.experts, moe.top_k, **known)

    # ---- sessions ----

    def session(self) -> Session:
        """An empty session.  Raises ``DoesNotFit`` if its state has no room in the plan."""
        self.check_open()
        return Session(self)

    def load_session(self, path: str | os.PathLike[str]) -> Session:
        """The session that ``Session.save`` left in the folder ``path``.

        Raises ``SessionError`` naming what differs (model, tokenizer, precision) or the file that
        is damaged, ``UsageError`` if it is longer than the context, ``DoesNotFit`` or
        ``ScratchError`` if it has no room.
        """
        self.check_open()
        session, notes = load_session(self, path)
        for note in notes:
            self.warn(note)
        return session

    def new_state(self, snapshot: SequenceState | None = None) -> SequenceState:
        """An empty state, or one that goes on from ``snapshot``.  Raises ``DoesNotFit``."""
        with self.blamed():
            state = self._empty(self._ledger)
            if snapshot is not None:
                state.take(snapshot)
        return state

    def copied(self, state: SequenceState) -> SequenceState:
        """A copy of ``state``."""
        with self.blamed():
            return state.copy()

    def blamed(self) -> AbstractContextManager[None]:
        """What a device raises in the block names it."""
        return self.accelerator.blamed() if self.accelerator else nullcontext()

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; spellings of special tokens are ordinary text."""
        return self.tokenizer.encode(text)

    def check_context(self, tokens: int) -> None:
        """Raise ``UsageError`` if a session of ``tokens`` tokens is longer than allowed."""
        limit = min(self.options.context, self.spec.context)
        if tokens > limit:
            raise TooLong(
                f"{tokens:,} tokens (prompt and answer) are more than the context of {limit:,}.",
                "Shorten the prompt, ask for fewer tokens, or load with a larger context.",
            )

    def batch(
        self,
        documents: Iterable[Document | str],
        *,
        prompt: str = "{text}",
        max_new_tokens: int | None = None,
        sampling: Sampling | None = None,
        labels: Sequence[str] | None = None,
        label_end: str | Sequence[int] = "",
        on_error: OnError = "record",
        order: Order = "input",
        watch: Callable[[Tally], None] = lambda tally: None,
    ) -> Batch:
        """An iterator over ``Result``, one for each of ``documents``, which are taken as places
        become free: as many at a time as the engine was loaded for (``sessions``).

        ``prompt``: what a document is put into, at ``{text}``; ``max_new_tokens``: 256 unless said;
        ``labels``: nothing is generated, and the likeliest of them is the answer, with
        ``label_end`` behind each, both as in ``score_labels``; ``on_error``: ``record`` what is
        wrong with a document in its result, or ``raise`` it; ``order``: results come as in the
        ``input``, or as they are ``completed``; ``watch``: told after every sweep.
        ``Batch.results()`` is the asynchronous form.  Raises ``UsageError`` for settings that
        cannot be; errors of the engine itself are raised by the iterator.
        """
        self.check_open()
        return Batch(
            self, documents, prompt=prompt, max_new_tokens=max_new_tokens, sampling=sampling,
            labels=labels, label_end=label_end, on_error=on_error, order=order, watch=watch,
        )  # fmt: skip

    # ---- work ----

    def advance(self, sessions: Sequence[Session]) -> None:
        """Compute everything that waits in ``sessions``, together in shared sweeps.

        Raises the error of the first session that failed.
        """
        while waiting := [s for s in sessions if s.needs_work]:
            for error in self.sweep(waiting).values():
                raise error

    def sweep(self, sessions: Sequence[Session]) -> dict[Session, K3Error]:
        """One pass over all layers for the next waiting tokens of ``sessions``.

        Decode tokens ride along and prompts share what the plan's sweep has left; who got nothing
        comes first next time.  Returns the sessions that failed with their errors: numbers that
        turned NaN, no room for more state, an expert that cannot be read.  The others are not
        touched by it.  Raises ``ReadError`` where that is not the expert alone, or the trunk.
        """
        return self._turns.sweep(sessions)

    def run(self, runs: Sequence[Run], emit: Callable[[int, int, torch.Tensor], None]) -> None:
        """One sweep over ``runs`` as they are; the lowest call that still knows sequences.

        Raises ``UsageError`` if the sweep is larger than planned, a decode run is not one token
        long, or two runs share a state; ``DeviceError`` if a device has failed or has no memory
        left, and then all states of the sweep are broken.
        """
        layers = len(self.spec.layers)
        rows = sum(len(run.tokens) for run in runs)
        if rows > self.plan.sweep_rows:
            raise UsageError(
                f"This sweep takes {rows} rows and the plan has {self.plan.sweep_rows}.",
                "Cut it, or load with a larger sweep.",
            )
        if any(run.decode and len(run.tokens) != 1 for run in runs):
            raise UsageError("A decode run has another length than one.", "Give it as a prompt.")
        if len({id(run.state) for run in runs}) < len(runs):
            raise UsageError("Two runs of a sweep share a state.", "Copy it, or run twice.")

        def before_layer(layer: int) -> None:
            self.hooks.before_layer(layer)
            self._watch.layer(layer, layers)

        def on_lost(page: PageId) -> None:
            self.hooks.on_lost(page)
            self.disk.probe(page)

        with self.lock:
            self.check_open()
            self.hooks.on_sweep(runs)
            hooks = replace(self.hooks, before_layer=before_layer, on_lost=on_lost)
            try:
                self._model.sweep(runs, emit, hooks)
            finally:
                self.hooks.on_swept()

    # ---- accounts ----

    def counts(self) -> dict[str, Counts]:
        """Requests so far, RAM over disk: ``experts``, ``trunk`` (layers), ``head`` (passes) and
        ``embedding`` (rows)."""
        return {kind: counts.copy() for kind, counts in self._counts.items()}

    @property
    def last_rows(self) -> tuple[int, int]:
        """Rows that the last ``sweep`` computed: that decoded, and of prompts."""
        return self._turns.rows

    @property
    def planned(self) -> int:
        """Bytes of the plan, and of sequence state that was let beyond it inside the limit."""
        return self.plan.total + self._ledger.beyond

    def holds(self, page: PageId) -> bool:
        """Whether an expert lies in RAM now."""
        return self.store is not None and self.store.has(page)

    def check_open(self) -> None:
        """Raise ``SessionError`` once it is closed."""
        if self._closed:
            raise SessionError("This engine is closed.", "Load the model again.")

    def close(self) -> None:
        """Wait for a sweep under way, then stop the threads, close the files and let go of the
        weights.  Closing twice is fine."""
        with self.lock:
            if not self._closed:
                self._closed = True
                with ExitStack() as last_first:  # whatever one of them raises, the others close
                    for watcher in self.closing:
                        last_first.callback(watcher)
                    for name in ("weights", "store", "_model", "_workers", "kernels"):
                        last_first.callback(self.__dict__.pop, name, None)
                    last_first.callback(self._workers.close)
                    last_first.callback(self.disk.close)
                    if self.spilling is not None:
                        last_first.callback(self.spilling.close)
                    if "weights" in self.__dict__:
                        last_first.callback(self.weights.close)
                    if self.accelerator is not None:  # first of all: its copies read the weights
                        last_first.callback(self.accelerator.close)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

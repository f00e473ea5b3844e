"""How a model is loaded: the options, checked, and who is told what meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .budget import state_bytes
from .config import KDA_CHUNK
from .errors import UsageError
from .kernels.latent_format import PRECISIONS
from .machine import Machine, default_threads
from .registry import chosen
from .scheduler.plan import Limits, Plan, Use, use_of
from .scheduler.schedule import predictor_named
from .spec import ModelSpec

DTYPES = ("bfloat16", "float32")  #: of the activations
THREADS_PER_PROCESSOR = 4
PREFIX_DISK = 16 * 10**9  #: bytes
POLICY, PREDICT = "reuse", "combined"  #: chosen by measurement, see LOG.md


@dataclass(frozen=True)
class Options:
    """How to load.  Sizes are bytes; ``ram`` None means most of what is free now."""

    ram: int | None = None
    cache: int | None = None
    dtype: str = "bfloat16"
    trunk: str | None = None  # None: as the folder has it
    latent_dtype: str | None = None  # None: as activations; int8 and fp8 lose some
    context: int = 4096
    sessions: int = 1
    fewer: bool = False  # so many sessions at most: as many as let each of them read least
    fewest: int = 1  # and so many at least
    held: int = 0  # tokens of the context that are computed already
    sweep: int | None = None  # tokens; None: as many as make prompt and answer read least
    answer: int | None = None  # tokens of ``context`` that are decoded; None: as often
    threads: int = field(default_factory=default_threads)
    extra: int = 0  # bytes the caller will keep beside the engine
    kernels: Mapping[str, str] = field(default_factory=dict)  # operator -> backend
    isa: str | None = None  # None: the best this processor has
    policy: str = POLICY
    predict: str = PREDICT
    vram: int | None = None  # bytes of the device; None: most of what is free there
    experts_on: str | None = None  # gpu or cpu; None: gpu where there is one
    trunk_on: str | None = None  # gpu, cpu or split:N; None: gpu where there is one
    adaptive: bool = False  # CPU or device for each expert, whichever ends sooner
    latents: int | None = None  # bytes of RAM for latents; None: all of them where they fit
    summaries: int | None = None  # bytes of RAM for a sweep's block summaries; None: all of them
    scratch: Path | None = None  # folder for what does not; None: in the user's cache folder
    prefix_cache: int | None = None  # bytes of shared snapshots; None: as few as prefix_dir needs
    prefix_head: int = 0  # tokens of a beginning to share where neither of the others is given
    prefix_dir: str | None = None  # where they are written to as well
    prefix_disk: int | None = None  # bytes of them there; None: PREFIX_DISK

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UsageError(f"dtype {self.dtype!r} is not known.", f"Use {' or '.join(DTYPES)}.")
        check_latent_dtype(self.latent_dtype)
        for name in ("context", "sessions", "sweep", "threads"):
            if name == "sweep" and self.sweep is None:
                continue
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}.", "It must be at least 1.")
        chosen("policy", self.policy)
        predictor_named(self.predict)
        most = THREADS_PER_PROCESSOR * default_threads()
        if self.prefix_disk is not None and self.prefix_dir is None:
            raise UsageError(
                "--prefix-disk bounds a folder that is not named.", "Name it: --prefix-dir DIR."
            )
        if self.threads > most:
            raise UsageError(f"threads is {self.threads}.", f"Use {most} at most on this machine.")

    def of_a_device(self) -> str:
        """The first option that was given and means nothing without a device; empty if none."""
        given = {
            "--vram": self.vram,
            "--experts-on": self.experts_on,
            "--trunk-on": self.trunk_on,
            "--adaptive-backend": self.adaptive or None,
        }
        return next((name for name, value in given.items() if value is not None), "")

    @property
    def use(self) -> Use | None:
        """What the engine is for, where nobody has chosen the sweep."""
        return use_of(self.sweep, self.context - self.held, self.sessions, self.answer)

    @property
    def keeps_ends(self) -> bool:
        """Whether every prompt leaves a snapshot, and not just the head of a batch."""
        return self.prefix_cache is not None or self.prefix_dir is not None

    def prefix_bytes(self, spec: ModelSpec) -> tuple[int, int]:
        """Bytes in RAM of snapshots that sessions share, and the same where latents spill.

        Raises ``UsageError`` if that is less than the smallest snapshot.
        """
        least = state_bytes(spec, self.dtype, KDA_CHUNK, self.latent_dtype)
        if self.prefix_cache is None:
            if self.prefix_dir is None:
                if not self.prefix_head:
                    return 0, 0
                return state_bytes(spec, self.dtype, self.prefix_head, self.latent_dtype), least
            # two of a prompt: where it ends, and where it leaves those before it
            whole = state_bytes(spec, self.dtype, self.context, self.latent_dtype)
            return whole + least, 2 * least
        if 0 < self.prefix_cache < least or (self.prefix_dir and not self.prefix_cache):
            raise UsageError(
                f"A prefix cache of {self.prefix_cache:,} bytes holds not one snapshot.",
                f"Give it {least:,} bytes or more, or leave it out.",
            )
        return self.prefix_cache, self.prefix_cache


@dataclass(frozen=True)
class Watch:
    """Who is told what: the plan before anything is loaded, loading, kernels that are compiled for
    a GPU, layers, warnings."""

    plan: Callable[[Plan], None] = lambda plan: None
    loading: Callable[[int, int], None] = lambda done, total: None
    compiling: Callable[[int, int], None] = lambda done, total: None
    layer: Callable[[int, int], None] = lambda layer, layers: None
    warn: Callable[[str], None] = lambda text: None


def check_latent_dtype(wanted: str | None) -> None:
    """Raise ``UsageError`` for a precision of latents that is not known."""
    if wanted is not None and wanted not in PRECISIONS:
        raise UsageError(
            f"The latent precision {wanted!r} is not known.",
            f"Use {' or '.join(PRECISIONS)}, or leave it out: then latents are kept as activations "
            "are, and nothing is lost.",
        )


def lossy_notes(latent_dtype: str | None) -> tuple[str, ...]:
    """What a plan says of latents that lose some."""
    if latent_dtype is None:
        return ()
    note = f"latents are kept in {latent_dtype} (--latent-dtype), which changes answers a little; "
    return (note + "k3offload damage measures how much.",)


def limits_of(machine: Machine, options: Options) -> Limits:
    """The smallest of the user's budget and what the machine allows, with a note if it differs."""
    allowed = int(machine.ceiling * 0.95)
    notes = lossy_notes(options.latent_dtype)
    if options.ram is None:
        total = int(machine.ceiling * 0.9)
    elif options.ram > allowed:
        total = allowed
        notes += (
            f"--ram {options.ram:,} is more than the {allowed:,} bytes that are free for this "
            "process now (physical memory and control group); the plan uses the latter.",
        )
    else:
        total = options.ram
    return Limits(
        total, options.cache, options.sweep, notes, options.latents, options.summaries, options.use
    )

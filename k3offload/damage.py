"""What a smaller precision of trunk or latents does to the answers, measured on text.

The same tokens pass through the same sweeps once for each precision.  The logits of the model as
shipped are kept in a file without a name, because two trunks need not fit into memory together;
each row of the others is compared with its row there.  Whoever runs this needs
tokens x vocabulary x 4 bytes of temporary disk space.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt
import torch

from .config import show_size
from .engine import Engine
from .errors import DoesNotFit, UsageError
from .kernels import latent_format
from .loading import open_engine
from .model import Emit, Run
from .precision import PRECISIONS
from .spec import ModelSpec
from .tokenizer import Tokenizer

WINDOW: Final = 1024  #: tokens that a sequence goes on for before the next one starts afresh
SWEEP: Final = 512
SHIPPED, *_LOSSY = PRECISIONS
LOSSY: Final = tuple(_LOSSY)
LOSSY_LATENTS: Final = latent_format.PRECISIONS
_TEXT: Final = Path(__file__).parent / "nano" / "held_out.txt"

Row = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Damage:
    """One precision against the model as shipped, over ``tokens`` tokens; nats."""

    precision: str  #: of the trunk
    latents: str  #: precision of the latents
    tokens: int
    trunk_bytes: int  #: of all layers and the head, as they lie in memory
    latent_bytes: int  #: of a token, all layers
    kl_mean: float  #: of KL(as shipped || this) of the next token
    kl_p99: float
    top1: float  #: share of tokens whose likeliest next token is the same
    nats: float  #: a token of the text

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__}


def held_out_text() -> str:
    """Text that the embedded model was not trained on."""
    return _TEXT.read_text("utf-8").split("\n\n", 1)[1]


def damage(
    model: str | Path,
    precisions: Sequence[str] = LOSSY,
    latents: Sequence[str] = (),
    *,
    text: str | None = None,
    tokens: int = 4096,
    show: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> list[Damage]:
    """Measure ``precisions`` of the trunk, then those of ``latents`` with the trunk as shipped, on
    the first ``tokens`` tokens of ``text`` (the built-in one if None).

    The first result is the model as shipped, against itself.  ``options`` are those of
    ``engine.load`` but for sizes.  Raises ``UsageError`` for a text of fewer than two tokens or an
    unknown precision, and whatever loading raises.
    """
    for names, known in ((precisions, LOSSY), (latents, LOSSY_LATENTS)):
        for name in names:
            if name not in known:
                raise UsageError(
                    f"{name!r} is no precision to be measured.", f"Use {' or '.join(known)}."
                )
    words = held_out_text() if text is None else text
    ids: list[int] = []

    def sizes(tokenizer: Tokenizer, spec: ModelSpec) -> dict[str, int]:
        ids[:] = tokenizer.encode(words)[:tokens]
        if len(ids) < 2:
            raise UsageError("The text has fewer than two tokens.", "Give a longer one.")
        return {"context": min(len(ids), WINDOW), "sweep": min(len(ids), SWEEP)}

    found: list[Damage] = []
    with tempfile.TemporaryFile() as kept:
        ways: list[tuple[str, str | None]] = [(name, None) for name in (SHIPPED, *precisions)]
        for trunk, packed in ways + [(SHIPPED, name) for name in latents]:
            with open_engine(model, sizes, trunk=trunk, latent_dtype=packed, **options) as engine:
                if not found:
                    _check_room(len(ids) * engine.spec.vocab * 4)
                found.append(_measure(engine, ids, kept, show, writes=not found))
    return found


def _check_room(size: int) -> None:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if size > free:
        raise DoesNotFit(
            f"The logits to compare with take {show_size(size)}, and {folder} has "
            f"{show_size(free)} free.",
            "Measure fewer tokens, or set TMPDIR to a folder with more room.",
            missing=size - free,
        )


class _Comparison:
    """Row by row: the logits of a precision with those of the model as shipped.

    The reference itself writes its rows to ``kept``; any other reads them there."""

    def __init__(self, ids: Sequence[int], vocab: int, kept: IO[bytes], writes: bool) -> None:
        self._ids, self._size, self._kept, self._writes = ids, vocab * 4, kept, writes
        self.kl = np.zeros(len(ids))
        self.same = np.zeros(len(ids), bool)
        self.nats: list[float] = []

    def emit(self, begin: int, end: int) -> Emit:
        """Takes the logits of the sequence that is tokens ``begin:end`` of the text."""

        def take(run: int, position: int, logits: torch.Tensor) -> None:
            for i, row in enumerate(logits.numpy(), begin + position):
                self._compare(i, row, self._ids[i + 1] if i + 1 < end else None)

        return take

    def _compare(self, i: int, row: npt.NDArray[np.float32], following: int | None) -> None:
        if self._writes:
            self._kept.write(row.tobytes())
            shipped = row
        else:
            self._kept.seek(i * self._size)
            shipped = np.frombuffer(self._kept.read(self._size), np.float32)
        p, q = _log_softmax(shipped), _log_softmax(row)
        self.kl[i] = (np.exp(p) * (p - q)).sum()
        self.same[i] = shipped.argmax() == row.argmax()
        if following is not None:
            self.nats.append(float(-q[following]))


def _measure(
    engine: Engine, ids: Sequence[int], kept: IO[bytes], show: Callable[[str], None], writes: bool
) -> Damage:
    """One pass over the text; ``writes``: it is what the others are compared with."""
    packed, form = engine.options.latent_dtype, engine.latent_form
    name = engine.trunk if packed is None else f"latents {packed}"
    rows = _Comparison(ids, engine.spec.vocab, kept, writes)
    for begin in range(0, len(ids), WINDOW):
        end = min(begin + WINDOW, len(ids))
        state = engine.new_state()
        for first in range(begin, end, engine.plan.sweep_rows):
            show(f"{name}: {first:,} of {len(ids):,} tokens")
            some = ids[first : min(first + engine.plan.sweep_rows, end)]
            run = Run(state, some, len(some))
            engine.run([run], rows.emit(begin, end))
            if run.error is not None:
                raise run.error
        del state, run  # there is room for one sequence's state
    return Damage(
        precision=engine.trunk,
        latents=packed or engine.options.dtype,
        tokens=len(ids),
        trunk_bytes=engine.weights.trunk_bytes,
        latent_bytes=len(engine.spec.mla_layers) * form.row,
        kl_mean=float(rows.kl.mean()),
        kl_p99=float(np.quantile(rows.kl, 0.99)),
        top1=float(rows.same.mean()),
        nats=float(np.mean(rows.nats)),
    )


def _log_softmax(row: npt.NDArray[np.float32]) -> Row:
    wide = row.astype(np.float64)
    wide -= wide.max()
    result: Row = wide - np.log(np.exp(wide).sum())
    return result

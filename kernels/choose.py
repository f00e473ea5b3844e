"""One implementation of each operator, picked once when a model is loaded.

``OP_native.py`` where the native library is there, else ``OP_reference.py``; a caller may name
another for any operator.  Nothing falls back later: an operator that cannot run says so now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from ..errors import UsageError
from ..registry import implementation, names
from . import c_function, mixer, mixer_native, native, residual, residual_native
from .experts_reference import Job
from .glu_reference import Activation
from .latent_format import DECODE_ROOM, DEVICE_ROOM, PROMPT_ROOM, LatentFormat
from .linear_reference import Bundle, Weight
from .mixer import MixerRows, MixerWeights
from .mla_prefill_reference import Query
from .pieces import Pieces, unpacked
from .transfer import fetched, sent
from .triton_run import interpreted, one_at_a_time
from .workers import Workers

#: Operator -> the functions of its files.
OPS: Mapping[str, tuple[str, ...]] = {
    "linear": ("linear",),
    "experts": ("experts",),
    "router": ("router",),
    "combine": ("combine",),
    "rms_norm": ("rms_norm",),
    "attnres": ("attnres",),
    "short_conv": ("short_conv",),
    "kda_gate": ("kda_gate", "l2_norm", "gated_norm"),
    "kda": ("kda_step", "kda_chunk"),
    "mla_decode": ("mla_decode",),
    "mla_prefill": ("mla_prefill",),
    "latents": ("unpack",),
}
ROW_BY_ROW = ("rms_norm", "attnres", "short_conv", "kda_gate", "l2_norm", "gated_norm")
MIXED = ("short_conv", "kda_gate", "kda")  #: what `mixer` is put together from
NATIVE, REFERENCE, TRITON = "native", "reference", "triton"


FEW_ROWS = 8  #: decode rows whose calls are put off: more have much to keep and gain little
CPU = torch.device("cpu")


class Kernels:
    """The chosen operators for tensors at ``where``, bound to ``workers``.  ``chosen``: operator ->
    backend."""

    def __init__(
        self,
        workers: Workers,
        wanted: Mapping[str, str] | None = None,
        isa: str | None = None,
        where: torch.device = CPU,
    ) -> None:
        self.workers, self._where, self._on_cpu = workers, where, where.type == "cpu"
        self.waits = 0  #: times that results were waited for, here or by the host
        self.isa, self.why = _instruction_set(isa)
        self.chosen: dict[str, str] = {}
        functions: dict[str, Callable[..., Any]] = {}
        for op in sorted(set(wanted or {}) - set(OPS)):
            raise UsageError(f"There is no operator {op!r}.", f"Known: {', '.join(OPS)}.")
        for op, parts in OPS.items():
            backend = self._backend(op, (wanted or {}).get(op))
            module = implementation("kernels", op, backend)
            if hasattr(module, "linears"):
                functions["linears"] = module.linears
            for part in parts:
                functions[part] = getattr(module, part)
                if backend == TRITON:
                    functions[part] = one_at_a_time(functions[part])
                if part in ROW_BY_ROW and backend == NATIVE:  # torch's are done by the caller alone
                    functions[part] = partial(functions[part], workers=workers)
            self.chosen[op] = backend
        together = {self.chosen[op] for op in MIXED}
        if together == {NATIVE}:
            functions["mixer"] = mixer_native.mixer
        elif together == {TRITON}:  # imported only now: Triton is large
            own = implementation("kernels", "mixer", TRITON).mixer
            functions["mixer"] = one_at_a_time(own)
        else:
            functions["mixer"] = partial(mixer.composed, dict(functions))
        own = residual_native if self.chosen["attnres"] == NATIVE else residual
        functions["residual"], functions["output_gate"] = own.residual, own.output_gate
        #: what decode rows need is native, so that no other operator reads what was put off
        self._all_native = {self.chosen[op] for op in OPS if op != "mla_prefill"} == {NATIVE}
        self._f = functions

    def _backend(self, op: str, wanted: str | None) -> str:
        known = names("kernels", op)
        usable = [n for n in known if self._runs(n)]
        if wanted is None:
            return next(name for name in (NATIVE, REFERENCE, TRITON) if name in usable)
        if wanted not in known:
            raise UsageError(
                f"Operator {op} has no implementation {wanted!r}.", f"Known: {', '.join(known)}."
            )
        if wanted not in usable:
            why = "Triton kernels need a GPU." if wanted == TRITON else self.why
            raise UsageError(f"{op}={wanted} cannot run here: {why}", "Leave it out.")
        return wanted

    def _runs(self, backend: str) -> bool:
        if self._where.type != "cpu":
            return backend == TRITON
        if backend == TRITON:
            return interpreted()
        return backend != NATIVE or self.isa is not None

    def serving(self, part: str) -> Callable[..., Any]:
        """The function that serves ``part`` of an operator (see ``OPS``), or ``mixer``."""
        return self._f[part]

    def wrap(self, around: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
        """Let each part, and `finish`, be what ``around(its name, its function)`` gives: for
        whoever counts or times calls.  What parts call of one another is not wrapped."""
        self._f = {name: around(name, f) for name, f in self._f.items()}
        self.finish = around("finish", self.finish)  # type: ignore[method-assign]

    def in_force(self) -> AbstractContextManager[None]:
        """Calls from this thread run this instruction set inside the ``with`` block."""
        if self._where.type == "cuda":
            return torch.cuda.device(self._where)
        if self.isa is None or self.isa == native.isa():
            return nullcontext()
        return native.using(self.isa)

    def put_off(self, rows: int) -> AbstractContextManager[None]:
        """Calls inside the block, of ``rows`` decode rows and no others, may wait for `finish`."""
        return c_function.PutOff(self._all_native and 0 < rows <= FEW_ROWS)

    @property
    def waiting(self) -> bool:
        """Whether anything was put off."""
        return c_function.waiting()

    def finish(self) -> None:
        """Compute what was put off: before anything but an operator of these reads a result, and
        before weights or pages that it was given may go."""
        c_function.finish()

    def dense(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` as contiguous memory: how a row lies is part of its bits."""
        if x.is_contiguous():
            return x
        self.finish()
        return x.contiguous()

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Rows one after the other."""
        if len(parts) == 1:
            return parts[0]
        self.finish()
        return torch.cat(list(parts))

    def to_host(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """``tensors`` in RAM, waited for together."""
        self.finish()
        self.waits += 1
        return fetched(tensors)

    def here(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """``tensors`` where these operators compute; nobody waits for what comes from RAM."""
        if self._on_cpu:
            return list(tensors) if all(t.is_cpu for t in tensors) else self.to_host(*tensors)
        return [t if t.device == self._where else sent(t, self._where) for t in tensors]

    def linear(self, x: torch.Tensor, weight: Weight, decode: bool = False) -> torch.Tensor:
        y: torch.Tensor = self._f["linear"](x, weight, self.workers, decode)
        return y

    def linears(
        self, x: torch.Tensor, bundle: Bundle, decode: bool = False
    ) -> Sequence[torch.Tensor]:
        """``linear`` of each weight of ``bundle``, with the same bits."""
        together = self._f.get("linears")
        if together is None:
            return [self.linear(x, weight, decode) for weight in bundle.weights]
        ys: list[torch.Tensor] = together(x, bundle, self.workers, decode)
        return ys

    def experts(
        self,
        x: torch.Tensor,
        jobs: Sequence[Job],
        act: Activation,
        decode: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        y: torch.Tensor = self._f["experts"](x, jobs, act, self.workers, decode, out)
        return y

    def combine(self, x: torch.Tensor, at: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._f["combine"](x, at, weights, self.workers)
        return y

    def router(
        self,
        x: torch.Tensor,
        gate: Weight,
        bias: torch.Tensor,
        top_k: int,
        renormalize: bool,
        scale: float,
        decode: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        routed: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = self._f["router"](
            x, gate, bias, top_k, renormalize, scale, self.workers, decode
        )
        return routed

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        y: torch.Tensor = self._f["rms_norm"](x, weight, eps)
        return y

    def attnres(
        self,
        entries: Sequence[torch.Tensor],
        norm: torch.Tensor,
        query: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        y: torch.Tensor = self._f["attnres"](entries, norm, query, eps)
        return y

    def residual(
        self,
        base: torch.Tensor | None,
        y: torch.Tensor,
        more: torch.Tensor | None,
        out: torch.Tensor,
        peaks: bool = False,
    ) -> torch.Tensor | None:
        """``out`` = ``base`` + (``y`` + ``more``); ``y`` is used up.  With ``peaks`` the largest
        magnitude of each row, [R] float32."""
        found: torch.Tensor | None = self._f["residual"](base, y, more, out, peaks, self.workers)
        return found

    def output_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """``x`` [R, N] float32, which is used up, times sigmoid(``gate``) [R, N] -> [R, N] in
        ``gate``'s dtype."""
        y: torch.Tensor = self._f["output_gate"](x, gate, self.workers)
        return y

    def mixer(
        self,
        rows: MixerRows,
        tails: Sequence[torch.Tensor],
        state: torch.Tensor,
        w: MixerWeights,
        decode: bool,
    ) -> torch.Tensor:
        """A KDA layer between its projections; ``tails`` and ``state`` move on."""
        y: torch.Tensor = self._f["mixer"](rows, tails, state, w, decode, self.workers)
        return y

    def unpacked(
        self, pieces: Pieces, length: int, form: LatentFormat, dtype: torch.dtype, decode: bool
    ) -> Pieces:
        """``pieces`` of latents that are kept as ``form`` says, as ``mla_decode`` or (not
        ``decode``) ``mla_prefill`` take them: blocks [256, kv_lora + rope] of ``dtype``."""
        if form.precision is None:
            return pieces
        room = DECODE_ROOM if decode else PROMPT_ROOM
        most = form.at_once(room if self._where.type == "cpu" else DEVICE_ROOM)
        unpack = partial(self._f["unpack"], workers=self.workers)
        return unpacked(pieces, length, form, most, (dtype, self._where), unpack)

    def mla_decode(
        self,
        q: torch.Tensor,
        pieces: Pieces,
        length: int,
        up: Weight,
        nope: int,
        v: int,
        scale: float,
    ) -> torch.Tensor:
        """The attention result [h, v] of one decode token."""
        y: torch.Tensor = self._f["mla_decode"](
            q, pieces, length, up, nope, v, scale, self.workers
        )[0]
        return y

    def mla_prefill(
        self,
        queries: Sequence[Query],
        pieces: Pieces,
        length: int,
        up: Weight,
        nope: int,
        v: int,
        scale: float,
    ) -> list[torch.Tensor]:
        """The attention results [n, h, v] of prompt rows of one sequence."""
        ys: list[torch.Tensor] = self._f["mla_prefill"](
            queries, pieces, length, up, nope, v, scale, self.workers
        )
        return ys


def _instruction_set(wanted: str | None) -> tuple[str | None, str]:
    """The instruction set in use (None without the native library), and why."""
    if not native.available():
        if wanted is not None:
            raise UsageError(f"--isa {wanted} cannot be had: {native.why_not()}", "Leave it out.")
        return None, native.why_not()
    known = native.isas()
    if wanted is not None and wanted not in known:
        raise UsageError(f"This processor has no {wanted!r}.", f"It can run {', '.join(known)}.")
    isa = wanted or known[0]
    return isa, f"native kernels for {isa}"

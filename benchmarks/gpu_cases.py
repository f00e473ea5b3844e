"""The GPU kernels as ``gpu_suite.py`` checks and times them: inputs, calls, bytes, operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from k3offload.kernels.experts_reference import Job
from k3offload.kernels.glu_reference import Activation
from k3offload.kernels.int8 import Int8Weight
from k3offload.kernels.latent_format import PRECISIONS, LatentFormat
from k3offload.kernels.latents_reference import pack
from k3offload.kernels.linear_reference import DenseWeight, Weight
from k3offload.kernels.mixer import MixerRows, MixerWeights
from k3offload.kernels.mla_prefill_reference import Query
from k3offload.kernels.mxfp4 import Mxfp4Weight
from k3offload.kernels.triton_run import Sizes

#: for the machinery alone: what the interpreter can do in seconds
SMALL = Sizes(256, 128, 96, 40, 4, 4, 32, 4, 64, 64, 32, 16, 32, 3)
ACT = Activation("situ", 4.0, 25.0)
TOLERANCE = 2.0**-7  #: of the largest value: one rounding to bfloat16 more or less


class Case(NamedTuple):
    """One operator at one shape.  ``call(kernels, inputs)`` gives its results; ``read`` bytes of
    weights and state, ``macs`` multiply-adds: what bounds its time."""

    name: str
    inputs: dict[str, Any]
    call: Callable[..., Sequence[torch.Tensor]]
    read: float
    macs: float


def to(value: Any, where: torch.device) -> Any:
    """``value`` with all its tensors and weights at ``where``, changed by nobody else."""
    if isinstance(value, torch.Tensor):
        return value.to(where, copy=True)
    if isinstance(value, DenseWeight | Int8Weight | Mxfp4Weight):
        return moved(value, where)
    if isinstance(value, dict):
        return {key: to(part, where) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to(part, where) for part in value))
    if isinstance(value, list | tuple):
        return type(value)(to(part, where) for part in value)
    return value


def moved(weight: Weight, where: torch.device) -> Weight:
    """``weight`` with its numbers at ``where``, in memory of their own."""

    def there(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(where, copy=True)

    if isinstance(weight, DenseWeight):
        return DenseWeight(there(weight.tensor), weight.aligned)
    if isinstance(weight, Int8Weight):
        return Int8Weight(there(weight.q), there(weight.scale))
    assert isinstance(weight, Mxfp4Weight)
    return Mxfp4Weight(there(weight.packed), there(weight.scale))


class Draw:
    """Random inputs of one seed."""

    def __init__(self, seed: int) -> None:
        self._g = torch.Generator().manual_seed(seed)

    def rows(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=self._g) * scale).bfloat16()

    def floats(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._g)

    def weight(self, kind: str, n: int, k: int) -> Weight:
        """Numbers of about 1 / sqrt(k), so that results stay near 1."""
        if kind == "bfloat16":
            return DenseWeight(self.rows(n, k, scale=k**-0.5))
        if kind == "int8":
            q = torch.randint(-127, 128, (n, k), generator=self._g, dtype=torch.int8)
            return Int8Weight(q, torch.full((n, k // 64), k**-0.5 / 70).bfloat16())
        packed = torch.randint(0, 256, (n, k // 2), generator=self._g, dtype=torch.uint8)
        exponent = 127 - (k.bit_length() // 2 + 1)
        return Mxfp4Weight(packed, torch.full((n, k // 32), exponent, dtype=torch.uint8))


BYTES = {"bfloat16": 2.0, "int8": 1 + 2 / 64, "mxfp4": 0.5 + 1 / 32}  #: of a weight


def cases(s: Sizes, seed: int, rows: int) -> Iterator[Case]:
    """Every operator at the sizes ``s``: a decode row, and ``rows`` rows of a prompt."""
    draw = Draw(seed)
    yield from _products(s, draw, rows)
    yield from _small(s, draw, rows)
    yield from _kda(s, draw)
    yield from _mla(s, draw, rows)


def _products(s: Sizes, draw: Draw, rows: int) -> Iterator[Case]:
    n, k = s.heads * s.kda_dim, s.hidden
    for kind in BYTES:
        weight = draw.weight(kind, n, k)
        for count in (1, rows):
            yield Case(
                f"linear {kind} {count}",
                {"x": draw.rows(count, k), "w": weight},
                lambda f, i, d=count == 1: [f.linear(i["x"], i["w"], d)],
                n * k * BYTES[kind], count * n * k,
            )  # fmt: skip
    shapes = ((s.inner, s.latent), (s.inner, s.latent), (s.latent, s.inner))
    for jobs, each in ((s.top_k, 1), (s.top_k, max(2, rows * s.top_k // s.experts))):
        made = []
        for j in range(jobs):
            gate, up, down = (draw.weight("mxfp4", *shape) for shape in shapes)
            made.append(Job(gate, up, down, range(j, j + each)))
        weights = jobs * 3 * s.inner * s.latent
        yield Case(
            f"experts {jobs} x {each}",
            {"x": draw.rows(jobs + each, s.latent), "jobs": made},
            lambda f, i, d=each == 1: [f.experts(i["x"], i["jobs"], ACT, d)],
            weights * BYTES["mxfp4"], weights * each,
        )  # fmt: skip


def _small(s: Sizes, draw: Draw, rows: int) -> Iterator[Case]:
    gate, bias = draw.weight("bfloat16", s.experts, s.hidden), draw.floats(s.experts) / 10
    for count in (1, rows):
        x = draw.rows(count, s.hidden)
        yield Case(
            f"router {count}", {"x": x, "gate": gate, "bias": bias},
            lambda f, i, d=count == 1: f.router(
                i["x"], i["gate"], i["bias"], s.top_k, True, 1.0, d)[1:],
            2 * s.experts * s.hidden, count * s.experts * s.hidden,
        )  # fmt: skip
        entries = [draw.rows(count, s.hidden) for _ in range(s.summaries)]
        norm, query = draw.rows(s.hidden), draw.rows(s.hidden, scale=0.1)
        yield Case(
            f"attnres {count}", {"entries": entries, "norm": norm, "query": query},
            lambda f, i: [f.attnres(i["entries"], i["norm"], i["query"], 1e-5)],
            2 * count * s.hidden * (s.summaries + 1), 0,
        )  # fmt: skip
        yield Case(
            f"rms_norm {count}", {"x": x, "w": norm},
            lambda f, i: [f.rms_norm(i["x"], i["w"], 1e-5)],
            4 * count * s.hidden, 0,
        )  # fmt: skip
        y, at = draw.rows(count * s.top_k, s.latent), torch.arange(count * s.top_k).view(count, -1)
        yield Case(
            f"combine {count}", {"y": y, "at": at, "w": draw.floats(count, s.top_k).abs()},
            lambda f, i: [f.combine(i["y"], i["at"], i["w"])],
            2 * count * s.latent * (s.top_k + 1), 0,
        )  # fmt: skip


def _kda(s: Sizes, draw: Draw) -> Iterator[Case]:
    h, d = s.heads, s.kda_dim
    taps = tuple(draw.floats(h * d, s.taps) for _ in range(3))
    fixed = MixerWeights(taps, draw.floats(h), draw.floats(h * d), draw.floats(d), -5.0, 1e-5)
    for count in (1, 64):
        wide = [draw.rows(count, h * d) for _ in range(5)]
        rows = MixerRows(wide[:3], wide[3], draw.rows(count, h), wide[4])
        tails = [draw.rows(s.taps - 1, h * d) for _ in range(3)]

        def call(f: Any, i: dict[str, Any], decode: bool = count == 1) -> list[torch.Tensor]:
            out = f.mixer(i["rows"], i["tails"], i["state"], i["fixed"], decode)
            return [out, i["state"]]

        yield Case(
            f"mixer {count}",
            {"rows": rows, "tails": tails, "state": draw.floats(h, d, d) / 4, "fixed": fixed},
            call, 8 * h * d * d, count * h * d * (4 * 64 + 3 * d if count > 1 else 4 * d),
        )  # fmt: skip


def _mla(s: Sizes, draw: Draw, rows: int) -> Iterator[Case]:
    up, width = draw.weight("bfloat16", s.heads * (s.nope + s.v), s.kv_lora), s.nope + s.rope
    for length in (300, 8 * rows):
        blocks = [draw.rows(256, s.kv_lora + s.rope) for _ in range(-(-length // 256))]
        yield Case(
            f"mla_decode {length}", {"q": draw.rows(s.heads, width), "blocks": blocks, "up": up},
            lambda f, i, n=length: [
                f.mla_decode(i["q"], [i["blocks"]], n, i["up"], s.nope, s.v, width**-0.5)],
            2 * (s.heads * (s.nope + s.v) * s.kv_lora + length * (s.kv_lora + s.rope)),
            length * s.heads * (2 * s.kv_lora + s.rope),
        )  # fmt: skip
    queries = [Query(draw.rows(64, s.heads, width), rows - 64)]
    blocks = [draw.rows(256, s.kv_lora + s.rope) for _ in range(-(-rows // 256))]
    yield Case(
        f"mla_prefill {rows}", {"queries": queries, "blocks": blocks, "up": up},
        lambda f, i: f.mla_prefill(
            i["queries"], [i["blocks"]], rows, i["up"], s.nope, s.v, width**-0.5),
        2 * s.heads * (s.nope + s.v) * s.kv_lora,
        rows * s.heads * (s.nope + s.v) * s.kv_lora + 64 * rows * s.heads * (width + s.v),
    )  # fmt: skip
    for precision in PRECISIONS:
        form = LatentFormat(s.kv_lora, s.rope, 2, precision)
        packed, count = [pack(block, form) for block in blocks], 256 * len(blocks)
        yield Case(
            f"latents {precision} {count}", {"blocks": packed},
            lambda f, i, form=form: _unpacked(f, i["blocks"], form),
            count * (form.row + 2 * form.width), count * form.width,
        )  # fmt: skip


def _unpacked(f: Any, blocks: list[torch.Tensor], form: LatentFormat) -> list[torch.Tensor]:
    """Copies: pieces take turns in one memory."""
    pieces = f.unpacked([blocks], 256 * len(blocks), form, torch.bfloat16, False)
    return [block.clone() for piece in pieces for block in piece]

"""The operators as the kernel contract sees them: their files, inputs, float64 definitions.

A new implementation ``kernels/HOME_BACKEND.py`` with a function of the operator's name is found
and tested without an edit here; a new operator needs an entry in ``OPS``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from k3offload import registry
from k3offload.kernels import native, triton_run
from k3offload.kernels.experts_reference import Job
from k3offload.kernels.linear_reference import DenseWeight, Weight
from k3offload.kernels.mxfp4 import Mxfp4Weight
from k3offload.kernels.workers import Workers

Tensors = tuple[torch.Tensor, ...]
Inputs = dict[str, Any]
Function = Callable[..., Any]


@dataclass(frozen=True)
class Op:
    """One operator.

    ``rows``: names of the inputs whose first dimension are independent rows (so are the outputs');
    ``call`` runs an implementation on inputs; ``exact`` is the definition, in float64;
    ``tolerance``: largest error allowed, relative to the largest exact value (for float32 inputs;
    what is rounded to bfloat16 gets 2**-8 more).
    """

    name: str
    home: str
    rows: tuple[str, ...]
    make: Callable[[int, torch.Generator, torch.dtype], Inputs]
    call: Callable[[Function, Inputs, Workers], Tensors]
    exact: Callable[[Inputs], Tensors]
    tolerance: float = 2e-6
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)


def implementations(op: Op) -> dict[str, Function]:
    """BACKEND -> function, of every file that has one and can run here."""
    return {b: getattr(m, op.name) for b, m in backends(op.home).items() if hasattr(m, op.name)}


def backends(home: str) -> dict[str, ModuleType]:
    """BACKEND -> module, of every ``kernels/HOME_BACKEND.py`` that can run here."""
    usable = {"reference": True, "native": native.available(), "triton": triton_run.interpreted()}
    found = [name for name in registry.names("kernels", home) if usable[name]]
    return {name: registry.implementation("kernels", home, name) for name in found}


def randn(g: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=g).to(dtype)


# ---- linear ----

K, N = 160, 70
TILES = 600, 2048  #: a weight of several tiles, so that threads really share it


def dense(g: torch.Generator, dtype: torch.dtype, n: int = N, k: int = K) -> DenseWeight:
    return DenseWeight(randn(g, n, k, dtype=dtype))


def mxfp4(g: torch.Generator, n: int = N, k: int = K) -> Mxfp4Weight:
    packed = torch.randint(0, 256, (n, k // 2), generator=g, dtype=torch.uint8)
    scale = torch.randint(120, 130, (n, k // 32), generator=g, dtype=torch.uint8)
    return Mxfp4Weight(packed, scale)


def mxfp4_exact(weight: Mxfp4Weight) -> torch.Tensor:
    """[N, K] float64 by the format's definition, column by column."""
    n, k = weight.shape
    out = torch.empty(n, k, dtype=torch.float64)
    for column in range(k):
        byte = weight.packed[:, column // 2].long()
        code = byte // 16 if column % 2 else byte % 16
        value = torch.zeros(n, dtype=torch.float64)
        for c, size in enumerate([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]):
            value[code == c] = size
            value[code == c + 8] = -size
        exponent = weight.scale[:, column // 32].double() - 127
        out[:, column] = value * torch.exp2(exponent)
    return out


def weight_exact(weight: Weight) -> torch.Tensor:
    if isinstance(weight, Mxfp4Weight):
        return mxfp4_exact(weight)
    assert isinstance(weight, DenseWeight)
    return weight.tensor.double()


def _linear(
    make_weight: Callable[[torch.Generator, torch.dtype], Weight], k: int = K, decode: bool = False
) -> Op:
    return Op(
        name="linear",
        home="linear",
        rows=("x",),
        make=lambda r, g, t: {"x": randn(g, r, k, dtype=t), "weight": make_weight(g, t)},
        call=lambda f, i, w: (f(i["x"], i["weight"], w, decode),),
        exact=lambda i: (i["x"].double() @ weight_exact(i["weight"]).T,),
    )


def each_job(
    experts: Function, x: torch.Tensor, jobs: Sequence[Job], *rest: Any
) -> list[torch.Tensor]:
    """What ``experts`` gives for each of ``jobs``."""
    counts = [len(x) if job.rows is None else len(job.rows) for job in jobs]
    return list(torch.split(experts(x, jobs, *rest), counts))


# ---- router ----

EXPERTS, TOP_K = 40, 6


def _make_router(r: int, g: torch.Generator, t: torch.dtype) -> Inputs:
    gate = DenseWeight(randn(g, EXPERTS, K, dtype=torch.bfloat16) / 8)
    bias = randn(g, EXPERTS) / 10
    return {"x": randn(g, r, K, dtype=t), "gate": gate, "bias": bias, "top_k": TOP_K}


def router_exact(i: Inputs, renormalize: bool = True, scale: float = 2.5) -> Tensors:
    """Experts in rising order; ties go to the lower number."""
    scores = torch.sigmoid(i["x"].double() @ i["gate"].tensor.double().T)
    biased = scores + i["bias"].double()
    experts = torch.tensor(
        [
            sorted(sorted(range(len(row)), key=lambda e: (-row[e], e))[: i["top_k"]])
            for row in biased.tolist()
        ]
    )
    weights = scores.gather(1, experts)
    if renormalize:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return experts, weights * scale, biased


def _router(decode: bool) -> Op:
    def call(f: Function, i: Inputs, w: Workers) -> Tensors:
        routed: Tensors = f(i["x"], i["gate"], i["bias"], i["top_k"], True, 2.5, w, decode)
        return routed

    return Op("router", "router", ("x",), _make_router, call, router_exact)


def _make_combine(r: int, g: torch.Generator, t: torch.dtype) -> Inputs:
    at = torch.randint(0, 30, (r, TOP_K), generator=g)
    return {"x": randn(g, 30, K, dtype=t), "at": at, "weights": torch.rand(r, TOP_K, generator=g)}


def _exact_combine(i: Inputs) -> Tensors:
    return ((i["x"].double()[i["at"]] * i["weights"].double()[..., None]).sum(1),)


# ---- row by row ----

WIDTH = 100


def sizes(r: int) -> torch.Tensor:
    """[r, 1]: rows of every size from 1 down to 1e-4, where an epsilon shows."""
    return 10.0 ** -(torch.arange(r) % 5)[:, None]


def _make_norm(r: int, g: torch.Generator, t: torch.dtype) -> Inputs:
    x = randn(g, r, WIDTH) * sizes(r)
    return {"x": x.to(t), "weight": randn(g, WIDTH, dtype=t)}


def _exact_norm(i: Inputs, eps: float = 1e-5) -> Tensors:
    x = i["x"].double()
    normed = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return (normed * i["weight"].double(),)


def _make_pair(r: int, g: torch.Generator, t: torch.dtype) -> Inputs:
    return {"a": randn(g, r, WIDTH, dtype=t) * 8, "b": randn(g, r, WIDTH, dtype=t) * 30}


def _situ(linear_beta: float | None) -> Op:
    def exact(i: Inputs) -> Tensors:
        a, b = i["a"].double(), i["b"].double()
        capped = b if linear_beta is None else linear_beta * torch.tanh(b / linear_beta)
        return (4.0 * torch.tanh(a / 4.0) * torch.sigmoid(a) * capped,)

    return Op(
        "situ", "glu", ("a", "b"), _make_pair,
        lambda f, i, w: (f(i["a"], i["b"], 4.0, linear_beta),), exact,
    )  # fmt: skip


def _exact_silu(i: Inputs) -> Tensors:
    a = i["a"].double()
    return (a * torch.sigmoid(a) * i["b"].double(),)


def _attnres(entries: int) -> Op:
    names = tuple(f"entry{j}" for j in range(entries))

    def make(r: int, g: torch.Generator, t: torch.dtype) -> Inputs:
        made: Inputs = {n: randn(g, r, WIDTH, dtype=t) * (j + 1) for j, n in enumerate(names)}
        return {**made, "norm": randn(g, WIDTH, dtype=t), "query": randn(g, 1, WIDTH, dtype=t) / 8}

    def exact(i: Inputs) -> Tensors:
        v = torch.stack([i[n].double() for n in names])
        keys = v / torch.sqrt((v * v).mean(-1, keepdim=True) + 1e-5)
        shares = torch.softmax((keys * (i["norm"].double() * i["query"].double()[0])).sum(-1), 0)
        return ((shares[..., None] * v).sum(0),)

    return Op(
        "attnres", "attnres", names, make,
        lambda f, i, w: (f([i[n] for n in names], i["norm"], i["query"], 1e-5),), exact,
    )  # fmt: skip


HEADS, DIM = 5, 24


def _kda_gate(lower: float | None) -> Op:
    def make(r: int, g: torch.Generator, t: torch.dtype) -> Inputs:
        a_log, dt_bias = randn(g, HEADS), randn(g, HEADS * DIM)
        return {"raw": randn(g, r, HEADS * DIM, dtype=t) * 6, "a_log": a_log, "dt_bias": dt_bias}

    def exact(i: Inputs) -> Tensors:
        z = (i["raw"].double() + i["dt_bias"].double()).view(-1, HEADS, DIM)
        rate = torch.exp(i["a_log"].double())[:, None]
        if lower is not None:
            return (lower / (1 + torch.exp(-rate * z)),)
        return (-rate * torch.log1p(torch.exp(z)),)

    return Op(
        "kda_gate", "kda_gate", ("raw",), make,
        lambda f, i, w: (f(i["raw"], i["a_log"], i["dt_bias"], lower),), exact,
    )  # fmt: skip


def _make_heads(r: int, g: torch.Generator, t: torch.dtype) -> Inputs:
    gate, weight = randn(g, r, HEADS * DIM, dtype=t) * 3, randn(g, DIM)
    return {"x": randn(g, r, HEADS, DIM) * sizes(r)[..., None], "gate": gate, "weight": weight}


def _exact_gated_norm(i: Inputs) -> Tensors:
    x = i["x"].double()
    normed = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * i["weight"].double()
    return (normed.flatten(1) * torch.sigmoid(i["gate"].double()),)


def _exact_l2_norm(i: Inputs) -> Tensors:
    x = i["x"].double()
    return (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6),)


ONLY_FLOAT32 = (torch.float32,)
OPS: dict[str, Op] = {
    "linear-dense": _linear(lambda g, t: dense(g, t)),
    "linear-mxfp4": _linear(lambda g, t: mxfp4(g)),
    "linear-dense-tiles": _linear(lambda g, t: dense(g, t, *TILES), TILES[1]),
    "linear-mxfp4-tiles": _linear(lambda g, t: mxfp4(g, *TILES), TILES[1]),
    "linear-dense-decode": _linear(lambda g, t: dense(g, t), decode=True),
    "linear-mxfp4-decode": _linear(lambda g, t: mxfp4(g), decode=True),
    "linear-dense-tiles-decode": _linear(lambda g, t: dense(g, t, *TILES), TILES[1], True),
    "linear-mxfp4-tiles-decode": _linear(lambda g, t: mxfp4(g, *TILES), TILES[1], True),
    "router": _router(False),
    "router-decode": _router(True),
    "combine": Op(
        "combine", "combine", ("at", "weights"), _make_combine,
        lambda f, i, w: (f(i["x"], i["at"], i["weights"], w),), _exact_combine,
    ),
    "rms_norm": Op(
        "rms_norm", "rms_norm", ("x",), _make_norm,
        lambda f, i, w: (f(i["x"], i["weight"], 1e-5),), _exact_norm,
    ),
    "situ": _situ(25.0),
    "situ-uncapped": _situ(None),
    "silu": Op(
        "silu", "glu", ("a", "b"), _make_pair, lambda f, i, w: (f(i["a"], i["b"]),), _exact_silu
    ),
    "attnres-1": _attnres(1),
    "attnres-2": _attnres(2),
    "attnres-9": _attnres(9),
    "kda_gate": _kda_gate(-5.0),
    "kda_gate-softplus": _kda_gate(None),
    "l2_norm": Op(
        "l2_norm", "kda_gate", ("x",), _make_heads,
        lambda f, i, w: (f(i["x"]),), _exact_l2_norm, dtypes=ONLY_FLOAT32,
    ),
    "gated_norm": Op(
        "gated_norm", "kda_gate", ("x", "gate"), _make_heads,
        lambda f, i, w: (f(i["x"], i["gate"], i["weight"], 1e-5),), _exact_gated_norm,
    ),
}  # fmt: skip

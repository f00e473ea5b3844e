"""kda_step, kda_chunk: the gated delta rule of Kimi Delta Attention (arXiv 2510.26692).

Per head, with state S [dk, dv], decay a = exp(g) per key channel and strength b:
    S <- diag(a) S;   e = v - S^T k;   S <- S + b k e^T;   o = S^T q
``kda_chunk`` is the same recurrence for 64 tokens at once.  With G the running sum of g inside
the chunk, u_s = v_s - S0^T(e^{G_s} k_s) - sum_{r<s} b_r <k_s e^{G_s - G_r} k_r> u_r is a unit
triangular system.  g may reach -5 a token, so e^{-G} overflows: exponents are only ever taken of
differences that are <= 0, inside sub-blocks of 16 pair by pair and across sub-blocks relative to
the token before the later one.  The sums reach -320, where float32 is only good to 2e-5; the
difference of two of them is an exponent, so sums and differences are float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..config import HEAD_GROUP, SUB_BLOCK
from .rows import fill_up
from .workers import Workers


def kda_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    workers: Workers,
) -> torch.Tensor:
    """One token: ``q, k, g`` [h, dk], ``v`` [h, dv], ``beta`` [h], all float32.

    Changes ``state`` [h, dk, dv] in place; returns o [h, dv].
    """
    out = torch.empty_like(v)

    def task(i: int) -> None:
        heads = slice(i * HEAD_GROUP, (i + 1) * HEAD_GROUP)
        own = state[heads]
        own.mul_(torch.exp(g[heads])[:, :, None])
        error = v[heads] - torch.bmm(k[heads, None, :], own)[:, 0]
        own.add_((beta[heads, None] * k[heads])[:, :, None] * error[:, None, :])
        out[heads] = torch.bmm(q[heads, None, :], own)[:, 0]

    workers.map(task, -(-state.shape[0] // HEAD_GROUP))
    return out


def kda_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    workers: Workers,
) -> torch.Tensor:
    """One chunk of n <= 64 tokens: ``q, k, g`` [n, h, dk], ``v`` [n, h, dv], ``beta`` [n, h], all
    float32.  Changes ``state`` [h, dk, dv] in place; returns o [n, h, dv]."""
    rows = q.shape[0]
    args = [fill_up(a) for a in (q, k, v, g, beta)]  # zeros leave the state as it is
    out = torch.empty_like(args[2])

    def task(i: int) -> None:
        heads = slice(i * HEAD_GROUP, (i + 1) * HEAD_GROUP)
        own = [a[:, heads].transpose(0, 1).contiguous() for a in args]
        out[:, heads] = _chunk(own, state[heads]).transpose(0, 1)

    workers.map(task, -(-state.shape[0] // HEAD_GROUP))
    return out[:rows]


def _chunk(args: Sequence[torch.Tensor], state: torch.Tensor) -> torch.Tensor:
    """``args`` q, k, v, g [h, 64, d] and beta [h, 64] -> o [h, 64, dv]; moves ``state`` on."""
    q, k, v, g, beta = args
    total = torch.cumsum(g.double(), 1)
    pairs_k, pairs_q = _decayed_products(q, k, total)
    decay = _exp(total)
    system = pairs_k * beta[:, None, :]  # the unit diagonal is implied
    right = v - torch.bmm(k * decay, state)
    u = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u = u * beta[:, :, None]
    out = torch.bmm(q * decay, state) + torch.bmm(pairs_q, u)
    last = total[:, -1:]
    carried = (k * _exp(last - total)).transpose(1, 2)
    state.mul_(_exp(last).transpose(1, 2)).add_(torch.bmm(carried, u))
    return out


def _exp(exponent: torch.Tensor) -> torch.Tensor:
    """exp of a float64 difference of running sums, as float32."""
    return torch.exp(exponent).float()


def _decayed_products(
    q: torch.Tensor, k: torch.Tensor, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """<k_s e^{G_s-G_r} k_r> for r < s and <q_s e^{G_s-G_r} k_r> for r <= s, each [h, C, C]."""
    h, size, _ = k.shape
    pairs_k, pairs_q = torch.zeros(h, size, size), torch.zeros(h, size, size)
    step = min(SUB_BLOCK, size)
    later = torch.ones(step, step, dtype=torch.bool).triu(1)
    for begin in range(0, size, step):
        rows = slice(begin, begin + step)
        inside, kb, qb = total[:, rows], k[:, rows], q[:, rows]
        difference = inside[:, :, None] - inside[:, None]
        decay = _exp(difference.masked_fill_(later[None, :, :, None], float("-inf")))
        decay *= kb[:, None]
        pairs_q[:, rows, rows] = (decay * qb[:, :, None]).sum(-1)
        pairs_k[:, rows, rows] = (decay * kb[:, :, None]).sum(-1).tril(-1)
        if begin:
            base = total[:, begin - 1 : begin]
            down = _exp(inside - base)
            right = (k[:, :begin] * _exp(base - total[:, :begin])).transpose(1, 2)
            pairs_k[:, rows, :begin] = torch.bmm(kb * down, right)
            pairs_q[:, rows, :begin] = torch.bmm(qb * down, right)
    return pairs_k, pairs_q

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

import torch

SUB_BLOCK = 16


def kda_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """One token: ``q, k, g`` [h, dk], ``v`` [h, dv], ``beta`` [h], all float32.

    Changes ``state`` [h, dk, dv] in place; returns o [h, dv].
    """
    state.mul_(torch.exp(g)[:, :, None])
    error = v - torch.bmm(k[:, None, :], state)[:, 0]
    state.add_((beta[:, None] * k)[:, :, None] * error[:, None, :])
    return torch.bmm(q[:, None, :], state)[:, 0]


def kda_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """One chunk: ``q, k, g`` [h, C, dk], ``v`` [h, C, dv], ``beta`` [h, C], all float32.

    Padding rows have k = 0, g = 0, beta = 0 and leave the state as it is.  Changes ``state``
    [h, dk, dv] in place; returns o [h, C, dv].
    """
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

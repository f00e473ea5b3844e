"""The oracle: K3's forward pass in float64 numpy, written straight from the formulas.

No cache, no chunk, no sweep, no offload: every call computes all tokens from nothing, KDA one
token at a time.  Reads safetensors and MXFP4 itself and shares no line with the package, so that
agreement means something.  Covers every variant: with and without AttnRes, latent, shared
experts, q-LoRA, MLA gate, full-rank KDA gate, bounded decay, SiTU, MXFP4; Kimi Linear too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
Change = Callable[[str, F64], F64]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
MLA_EPS = 1e-6  # of the two low-rank norms; every other norm takes rms_norm_eps
L2_EPS = 1e-6  # on the SUM of squares of q and k
ROUTER_EPS = 1e-20


@dataclass
class Result:
    """What a run gives: T tokens, V ids, L MoE layers, k experts a token."""

    logits: F64  # [T, V]
    layers: list[int]  # indices of the MoE layers, [L]
    experts: NDArray[np.int64]  # [L, T, k], best score first
    weights: F64  # [L, T, k]
    margin: F64  # [L, T], score distance to the first expert not chosen
    trace: dict[str, F64] = field(default_factory=dict)  # "attn.l", "ffn.l": [T, hidden]


class Weights:
    """All tensors of a folder by full name, decoded to float64 when asked for.

    ``change`` may alter a decoded tensor, so that a test can ask what depends on it.
    """

    def __init__(self, folder: Path, change: Change | None = None) -> None:
        self.where: dict[str, tuple[Path, str, list[int], int]] = {}
        self.change = change
        for path in sorted(folder.glob("*.safetensors")):
            with path.open("rb") as f:
                size = int.from_bytes(f.read(8), "little")
                header = json.loads(f.read(size))
            header.pop("__metadata__", None)
            for name, t in header.items():
                at = 8 + size + t["data_offsets"][0]
                self.where[name] = (path, t["dtype"], t["shape"], at)

    def raw(self, name: str) -> NDArray[Any]:
        path, dtype, shape, at = self.where[name]
        kind = {"BF16": "<u2", "F32": "<f4", "U8": "u1"}[dtype]
        count = int(np.prod(shape))
        return np.fromfile(path, kind, count, offset=at).reshape(shape)

    def get(self, name: str) -> F64:
        """Tensor ``name``; an MXFP4 matrix by the name it would have unpacked."""
        if name not in self.where and name + "_packed" in self.where:
            out = mxfp4(self.raw(name + "_packed"), self.raw(name + "_scale"))
        else:
            raw = self.raw(name)
            if raw.dtype == np.uint16:
                raw = (raw.astype(np.uint32) << 16).view(np.float32)
            out = raw.astype(np.float64)
        return self.change(name, out) if self.change else out


def mxfp4(packed: NDArray[Any], scale: NDArray[Any]) -> F64:
    """Codes [rows, cols/2] and scales [rows, cols/32] -> numbers [rows, cols]."""
    codes = np.stack((packed & 15, packed >> 4), axis=-1).reshape(len(packed), -1)
    power = np.exp2(scale.astype(np.float64) - 127).repeat(32, axis=1)
    out: F64 = E2M1[codes] * power
    return out


def sigmoid(x: F64) -> F64:
    out: F64 = 0.5 * (1 + np.tanh(0.5 * x))
    return out


def softmax(x: F64) -> F64:
    e = np.exp(x - x.max(-1, keepdims=True))
    out: F64 = e / e.sum(-1, keepdims=True)
    return out


def rms(x: F64, eps: float) -> F64:
    out: F64 = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return out


class Oracle:
    """One checkpoint; ``run`` computes logits of a token sequence from nothing."""

    def __init__(self, folder: Path | str, change: Change | None = None, **config: object) -> None:
        """``config`` overrides fields of the text configuration."""
        top = json.loads((Path(folder) / "config.json").read_text())
        self.c: dict[str, Any] = {**top.get("text_config", top), **config}
        self.weights = Weights(Path(folder), change)
        self.prefix = "language_model." if "text_config" in top else ""
        self.kept: dict[str, F64] = {}

    def w(self, name: str) -> F64:
        if name not in self.kept:
            self.kept[name] = self.weights.get(self.prefix + name)
        return self.kept[name]

    def linear(self, x: F64, name: str) -> F64:
        out: F64 = x @ self.w(name + ".weight").T
        return out

    def run(self, tokens: Sequence[int] | NDArray[np.int64], trace: bool = False) -> Result:
        c, eps = self.c, float(self.c["rms_norm_eps"])
        block = c.get("attn_res_block_size")
        routes: list[tuple[int, NDArray[np.int64], F64, F64]] = []
        seen: dict[str, F64] = {}
        p = self.w("model.embed_tokens.weight")[np.asarray(tokens)]
        snapshots: list[F64] = []
        for i in range(c["num_hidden_layers"]):
            at = f"model.layers.{i}."
            h = self.mix(p, snapshots, at + "self_attention_res")
            start = block is not None and i % block == 0
            if start:
                snapshots.append(p)
            y = self.attention(i, rms(h, eps) * self.w(at + "input_layernorm.weight"))
            p = y if start else p + y
            h = self.mix(p, snapshots, at + "mlp_res")
            x = rms(h, eps) * self.w(at + "post_attention_layernorm.weight")
            dense = i < c["first_k_dense_replace"] or i % c.get("moe_layer_freq", 1) != 0
            z = self.glu(x, at + "mlp.") if dense else self.moe(i, x, routes)
            p = p + z
            if trace:
                seen[f"attn.{i}"], seen[f"ffn.{i}"] = y, z
        p = self.mix(p, snapshots, "model.output_attn_res")
        tied = c.get("tie_word_embeddings", False)
        head = self.w("model.embed_tokens.weight" if tied else "lm_head.weight")
        logits = (rms(p, eps) * self.w("model.norm.weight")) @ head.T
        k = c["num_experts_per_token"]
        shape = (len(routes), len(p), k)
        return Result(
            logits,
            [r[0] for r in routes],
            np.array([r[1] for r in routes], np.int64).reshape(shape),
            np.array([r[2] for r in routes], np.float64).reshape(shape),
            np.array([r[3] for r in routes], np.float64).reshape(shape[:2]),
            seen,
        )

    def mix(self, p: F64, snapshots: list[F64], name: str) -> F64:
        """Block AttnRes: softmax over the snapshots and the running sum (last)."""
        if not snapshots:
            return p
        query = self.w(name + "_norm.weight") * self.w(name + "_proj.weight")[0]
        v = np.stack([*snapshots, p], axis=1)  # [T, n+1, hidden]
        a = softmax(rms(v, float(self.c["rms_norm_eps"])) @ query)
        out: F64 = np.einsum("tn,tnh->th", a, v)
        return out

    def attention(self, i: int, x: F64) -> F64:
        kda = i + 1 in self.c["linear_attn_config"]["kda_layers"]
        at = f"model.layers.{i}.self_attn."
        return self.kda(at, x) if kda else self.mla(at, x)

    def kda(self, at: str, x: F64) -> F64:
        c = self.c["linear_attn_config"]
        t, nh, d = len(x), c["num_heads"], c["head_dim"]

        def lin(v: F64, name: str) -> F64:
            return self.linear(v, at + name)

        q, k, v = (self.conv(lin(x, n + "_proj"), f"{at}{n}_conv1d.weight") for n in "qkv")
        q, k, v = (a.reshape(t, nh, d) for a in (q, k, v))
        q = q / np.sqrt((q * q).sum(-1, keepdims=True) + L2_EPS) * d**-0.5
        k = k / np.sqrt((k * k).sum(-1, keepdims=True) + L2_EPS)
        z = (lin(lin(x, "f_a_proj"), "f_b_proj") + self.w(at + "dt_bias")).reshape(t, nh, d)
        speed = np.exp(self.w(at + "A_log").reshape(-1)[:nh])[:, None]
        bound = c.get("gate_lower_bound")
        if bound is None:
            g = -speed * np.where(z > 20, z, np.logaddexp(0, z))
        else:
            g = bound * sigmoid(speed * z)
        decay, beta = np.exp(g), sigmoid(lin(x, "b_proj"))
        state, out = np.zeros((nh, d, d)), np.empty((t, nh, d))  # state [head, k, v]
        for s in range(t):
            state *= decay[s][:, :, None]
            error = v[s] - np.einsum("hkv,hk->hv", state, k[s])
            state += beta[s][:, None, None] * k[s][:, :, None] * error[:, None, :]
            out[s] = np.einsum("hkv,hk->hv", state, q[s])
        low_rank = not c.get("use_full_rank_gate", False)
        gate = lin(lin(x, "g_a_proj"), "g_b_proj") if low_rank else lin(x, "g_proj")
        out = rms(out, float(self.c["rms_norm_eps"])) * self.w(at + "o_norm.weight")
        out *= sigmoid(gate).reshape(t, nh, d)
        return lin(out.reshape(t, nh * d), "o_proj")

    def conv(self, x: F64, name: str) -> F64:
        """Causal depthwise convolution, then SiLU; the last tap is the current token."""
        taps = self.w(name)[:, 0, :]  # [channels, taps]
        n = taps.shape[1]
        padded = np.concatenate((np.zeros((n - 1, x.shape[1])), x))
        y = sum((padded[j : j + len(x)] * taps[:, j] for j in range(n)), np.zeros_like(x))
        return y * sigmoid(y)

    def mla(self, at: str, x: F64) -> F64:
        c, t = self.c, len(x)
        nh, nope, rope = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        rank, dv = c["kv_lora_rank"], c["v_head_dim"]

        def lin(v: F64, name: str) -> F64:
            return self.linear(v, at + name)

        if c.get("q_lora_rank"):
            low = rms(lin(x, "q_a_proj"), MLA_EPS) * self.w(at + "q_a_layernorm.weight")
            q = lin(low, "q_b_proj")
        else:
            q = lin(x, "q_proj")
        q = q.reshape(t, nh, nope + rope)
        kv = lin(x, "kv_a_proj_with_mqa")
        latent = rms(kv[:, :rank], MLA_EPS) * self.w(at + "kv_a_layernorm.weight")
        up = lin(latent, "kv_b_proj").reshape(t, nh, nope + dv)
        shared_key = np.broadcast_to(kv[:, None, rank:], (t, nh, rope))
        k, v = np.concatenate((up[..., :nope], shared_key), -1), up[..., nope:]
        scores = np.einsum("qhd,khd->hqk", q, k) * (nope + rope) ** -0.5
        scores = np.where(np.tri(t, dtype=bool), scores, -np.inf)
        out = np.einsum("hqk,khd->qhd", softmax(scores), v).reshape(t, nh * dv)
        if c.get("mla_use_output_gate", False):
            out *= sigmoid(lin(x, "g_proj"))
        return lin(out, "o_proj")

    def act(self, a: F64, b: F64) -> F64:
        if self.c["hidden_act"] == "silu":
            return a * sigmoid(a) * b
        cap, linear_cap = self.c["activation_situ_beta"], self.c.get("activation_situ_linear_beta")
        b = b if linear_cap is None else linear_cap * np.tanh(b / linear_cap)
        out: F64 = cap * np.tanh(a / cap) * sigmoid(a) * b
        return out

    def glu(
        self, x: F64, at: str, names: Sequence[str] = ("gate_proj", "up_proj", "down_proj")
    ) -> F64:
        gate, up, down = (at + n for n in names)
        return self.linear(self.act(self.linear(x, gate), self.linear(x, up)), down)

    def moe(self, i: int, x: F64, routes: list[Any]) -> F64:
        c, at = self.c, f"model.layers.{i}.block_sparse_moe."
        k, latent = c["num_experts_per_token"], c.get("routed_expert_hidden_size")
        score = sigmoid(self.linear(x, at + "gate"))
        biased = score + self.w(at + "gate.e_score_correction_bias")
        order = np.argsort(-biased, axis=-1, kind="stable")
        chosen = order[:, :k]
        ranked = np.take_along_axis(biased, order, -1)
        more = ranked.shape[1] > k
        margin = ranked[:, k - 1] - ranked[:, k] if more else np.full(len(x), np.inf)
        weight = np.take_along_axis(score, chosen, -1)
        if c.get("moe_renormalize", False):
            weight = weight / (weight.sum(-1, keepdims=True) + ROUTER_EPS)
        weight = weight * c.get("routed_scaling_factor", 1.0)
        routes.append((i, chosen, weight, margin))
        z = self.linear(x, at + "routed_expert_down_proj") if latent else x
        out = np.zeros_like(z)
        for e in np.unique(chosen):
            row, slot = np.nonzero(chosen == e)
            y = self.glu(z[row], f"{at}experts.{e}.", ("w1", "w3", "w2"))
            out[row] += weight[row, slot][:, None] * y
        if latent:
            if c.get("latent_moe_use_norm", False):
                norm = self.w(at + "routed_expert_norm.weight")
                out = rms(out, float(c["rms_norm_eps"])) * norm
            out = self.linear(out, at + "routed_expert_up_proj")
        return out + self.glu(x, at + "shared_experts.") if c.get("num_shared_experts") else out

    def greedy(self, tokens: Sequence[int], n: int) -> tuple[list[int], list[float]]:
        """``n`` greedy tokens and how far each was ahead of the second (in logits)."""
        out, margins = list(map(int, tokens)), []
        for _ in range(n):
            last = self.run(out).logits[-1]
            best, second = np.sort(last)[[-1, -2]]
            margins.append(float(best - second))
            out.append(int(last.argmax()))
        return out[len(tokens) :], margins


def oracle_logits(
    folder: Path | str, tokens: Sequence[int] | NDArray[np.int64], trace: bool = False
) -> Result:
    """Logits, routing and (``trace``) every sublayer's output for one token sequence."""
    return Oracle(folder).run(tokens, trace)

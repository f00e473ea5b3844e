"""Kimi K3 as anybody would write it in torch: a module for each layer, projection and expert.

The names of the parameters are those of the checkpoint without ``language_model.``, so that
``accelerate`` and whoever maps files find them.  Weights are used as they are stored; what the
released model computes in float32 is computed in float32.  It knows nothing of offloading, and
shares no line with the package whose baseline it is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.baselines.mxfp4 import Mxfp4Linear

MLA_EPS = 1e-6  # of the two low-rank norms
L2_EPS = 1e-6
Config = dict[str, Any]


def read_config(folder: Path) -> Config:
    """The text model's part of ``config.json``.  Raises ``ValueError`` for another model."""
    top = json.loads((folder / "config.json").read_text())
    config: Config = top.get("text_config", {})
    if top.get("model_type") != "kimi_k3" or not config.get("routed_expert_hidden_size"):
        raise ValueError(f"{folder} is no Kimi K3: the baselines know no other model.")
    return config


@dataclass
class Past:
    """What a sequence carries from call to call, by layer."""

    conv: dict[tuple[int, str], Tensor] = field(default_factory=dict)  # [taps - 1, channels]
    kda: dict[int, Tensor] = field(default_factory=dict)  # [heads, k, v], float32
    mla: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # keys and values [h, T, d]


class Weight(nn.Module):
    """One tensor: of a norm, or whatever has a name of its own."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Linear(Weight):
    def __init__(self, inp: int, out: int) -> None:
        super().__init__(out, inp)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def normed(x: Tensor, eps: float) -> Tensor:
    """float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


class Norm(Weight):
    """RMSNorm; the product with the weight is of ``x``'s type."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(size, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return normed(x, self.eps).to(x.dtype) * self.weight.to(x.dtype)


class Conv(Weight):
    """Causal convolution of each channel with its own taps, the last of which is for the present
    token; then SiLU.  ``past`` [taps - 1, channels] is what came before."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__(channels, 1, taps, dtype=torch.float32)

    def forward(self, x: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        taps = self.weight.shape[2]
        if past is None:
            past = x.new_zeros(taps - 1, x.shape[1])
        padded = torch.cat((past, x))
        out = F.conv1d(padded.float().T[None], self.weight, groups=x.shape[1])[0].T
        return F.silu(out).to(x.dtype), padded[len(x) :]


def mix(p: Tensor, blocks: list[Tensor], norm: Norm, query: Linear) -> Tensor:
    """Attention residual: shares of the sums of whole blocks and of the running sum, the last."""
    if not blocks:
        return p
    entries = torch.stack([*blocks, p], 1).float()  # [T, n, hidden]
    shares = torch.softmax(query(norm(entries)), 1)  # [T, n, 1]
    return (shares * entries).sum(1).to(p.dtype)


class Glu(nn.Module):
    """down(SiTU(gate, up)), by the names that its three projections have."""

    def __init__(
        self, c: Config, inp: int, wide: int, names: tuple[str, str, str], kind: type[nn.Module]
    ) -> None:
        super().__init__()
        self.names, self.caps = names, (c["activation_situ_beta"], c["activation_situ_linear_beta"])
        gate, up, down = names
        self.add_module(gate, kind(inp, wide))
        self.add_module(up, kind(inp, wide))
        self.add_module(down, kind(wide, inp))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (self.get_submodule(name) for name in self.names)
        cap, linear_cap = self.caps
        a, b = gate(x).float(), up(x).float()
        y = cap * torch.tanh(a / cap) * torch.sigmoid(a) * linear_cap * torch.tanh(b / linear_cap)
        return down(y.to(x.dtype))  # type: ignore[no-any-return]


DENSE = ("gate_proj", "up_proj", "down_proj")
EXPERT = ("w1", "w3", "w2")


class Kda(nn.Module):
    """Kimi Delta Attention, token by token."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        own, hidden = c["linear_attn_config"], c["hidden_size"]
        self.heads, self.dim, self.bound = (
            own["num_heads"],
            own["head_dim"],
            own["gate_lower_bound"],
        )
        wide, taps = self.heads * self.dim, own["short_conv_kernel_size"]
        for name in "qkv":
            self.add_module(f"{name}_proj", Linear(hidden, wide))
            self.add_module(f"{name}_conv1d", Conv(wide, taps))
        self.f_a_proj, self.f_b_proj = Linear(hidden, self.dim), Linear(self.dim, wide)
        self.b_proj, self.g_proj = Linear(hidden, self.heads), Linear(hidden, wide)
        self.o_proj = Linear(wide, hidden)
        self.o_norm = Norm(self.dim, c["rms_norm_eps"], torch.float32)
        stored = max(self.dim, self.heads)  # the release pads with zeros
        self.A_log = nn.Parameter(torch.empty(stored), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(wide), requires_grad=False)

    def forward(self, x: Tensor, layer: int, past: Past) -> Tensor:
        q, k, v = (self._heads(x, name, layer, past) for name in "qkv")
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + L2_EPS) * self.dim**-0.5
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + L2_EPS)
        z = self.f_b_proj(self.f_a_proj(x)).float() + self.dt_bias
        z = z.view(len(x), self.heads, self.dim)
        speed = self.A_log[: self.heads].exp()[:, None]
        decay = torch.exp(self.bound * torch.sigmoid(speed * z))[..., None]  # [T, h, k, 1]
        beta = torch.sigmoid(self.b_proj(x).float())[..., None]  # [T, h, 1]
        state = past.kda.get(layer)
        if state is None:
            state = torch.zeros(self.heads, self.dim, self.dim, device=x.device)
        out = torch.empty_like(v)
        for t in range(len(x)):
            state = state * decay[t]
            error = beta[t] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
            state.baddbmm_(k[t][:, :, None], error[:, None, :])
            out[t] = torch.einsum("hkv,hk->hv", state, q[t])
        past.kda[layer] = state
        gate = torch.sigmoid(self.g_proj(x).float()).view_as(out)
        return self.o_proj((self.o_norm(out) * gate).view(len(x), -1).to(x.dtype))  # type: ignore[no-any-return]

    def _heads(self, x: Tensor, name: str, layer: int, past: Past) -> Tensor:
        """[T, h, d] float32, after projection and convolution."""
        projected = self.get_submodule(f"{name}_proj")(x)
        conv = self.get_submodule(f"{name}_conv1d")
        out, past.conv[layer, name] = conv(projected, past.conv.get((layer, name)))
        return out.float().view(len(x), self.heads, self.dim)  # type: ignore[no-any-return]


class Mla(nn.Module):
    """Gated latent attention without positions.  Keys and values are kept as attention takes them,
    as the model's own code does."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        hidden, self.heads = c["hidden_size"], c["num_attention_heads"]
        self.nope, self.rope = c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        self.rank, self.dim, low = c["kv_lora_rank"], c["v_head_dim"], c["q_lora_rank"]
        self.q_a_proj, self.q_a_layernorm = Linear(hidden, low), Norm(low, MLA_EPS)
        self.q_b_proj = Linear(low, self.heads * (self.nope + self.rope))
        self.kv_a_proj_with_mqa = Linear(hidden, self.rank + self.rope)
        self.kv_a_layernorm = Norm(self.rank, MLA_EPS)
        self.kv_b_proj = Linear(self.rank, self.heads * (self.nope + self.dim))
        self.g_proj = Linear(hidden, self.heads * self.dim)
        self.o_proj = Linear(self.heads * self.dim, hidden)

    def forward(self, x: Tensor, layer: int, past: Past) -> Tensor:
        count = len(x)
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(count, self.heads, -1)
        latent, shared = self.kv_a_proj_with_mqa(x).split((self.rank, self.rope), -1)
        up = self.kv_b_proj(self.kv_a_layernorm(latent)).view(count, self.heads, -1)
        nope, v = up.split((self.nope, self.dim), -1)
        k = torch.cat((nope, shared[:, None].expand(-1, self.heads, -1)), -1)
        k, v = k.transpose(0, 1), v.transpose(0, 1)  # [h, T, d]
        if layer in past.mla:
            before = past.mla[layer]
            k, v = torch.cat((before[0], k), 1), torch.cat((before[1], v), 1)
        past.mla[layer] = k, v
        scores = (q.transpose(0, 1) @ k.mT).float() * (self.nope + self.rope) ** -0.5
        late = k.shape[1] - count
        mask = torch.ones(count, late + count, dtype=torch.bool, device=x.device).triu(late + 1)
        shares = torch.softmax(scores.masked_fill(mask, -torch.inf), -1).to(x.dtype)
        out = (shares @ v).transpose(0, 1).reshape(count, -1)
        return self.o_proj(out * torch.sigmoid(self.g_proj(x)))  # type: ignore[no-any-return]


class Router(Weight):
    """Chooses ``k`` experts of each row by biased scores; their weights come of the plain ones."""

    def __init__(self, c: Config) -> None:
        super().__init__(c["num_experts"], c["hidden_size"])
        bias = torch.empty(c["num_experts"])
        self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)
        self.k, self.scale = c["num_experts_per_token"], c["routed_scaling_factor"]
        self.renormalize = c["moe_renormalize"]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.sigmoid(F.linear(x.float(), self.weight.float()))
        chosen = torch.topk(scores + self.e_score_correction_bias, self.k).indices  # [T, k]
        weights = scores.gather(1, chosen)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * self.scale


class Moe(nn.Module):
    """Routed experts between two projections, each computed for all rows that chose it, beside
    shared ones."""

    def __init__(self, c: Config, kind: type[nn.Module]) -> None:
        super().__init__()
        hidden, latent, wide = (
            c["hidden_size"],
            c["routed_expert_hidden_size"],
            c["moe_intermediate_size"],
        )
        self.gate = Router(c)
        self.routed_expert_down_proj = Linear(hidden, latent)
        self.routed_expert_up_proj = Linear(latent, hidden)
        if c["latent_moe_use_norm"]:
            self.routed_expert_norm = Norm(latent, c["rms_norm_eps"])
        self.experts = nn.ModuleList(
            Glu(c, latent, wide, EXPERT, kind) for _ in range(c["num_experts"])
        )
        self.shared_experts = Glu(c, hidden, c["num_shared_experts"] * wide, DENSE, Linear)

    def forward(self, x: Tensor) -> Tensor:
        chosen, weights = self.gate(x)
        z = self.routed_expert_down_proj(x)
        out = torch.zeros(z.shape, device=x.device)
        for expert in chosen.unique().tolist():
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            y = self.experts[expert](z[rows]).float()
            out.index_add_(0, rows, y * weights[rows, places, None])
        out = out.to(x.dtype)
        if hasattr(self, "routed_expert_norm"):
            out = self.routed_expert_norm(out)
        return self.routed_expert_up_proj(out) + self.shared_experts(x)  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, c: Config, layer: int, kind: type[nn.Module]) -> None:
        super().__init__()
        hidden, eps, self.layer = c["hidden_size"], c["rms_norm_eps"], layer
        self.starts = layer % c["attn_res_block_size"] == 0
        is_kda = layer + 1 in c["linear_attn_config"]["kda_layers"]
        self.self_attn = Kda(c) if is_kda else Mla(c)
        dense = layer < c["first_k_dense_replace"]
        if dense:
            self.mlp = Glu(c, hidden, c["intermediate_size"], DENSE, Linear)
        else:
            self.block_sparse_moe = Moe(c, kind)
        self.feed_forward = ("mlp" if dense else "block_sparse_moe",)
        self.input_layernorm = Norm(hidden, eps)
        self.post_attention_layernorm = Norm(hidden, eps)
        self.self_attention_res_norm, self.mlp_res_norm = Norm(hidden, eps), Norm(hidden, eps)
        self.self_attention_res_proj, self.mlp_res_proj = Linear(hidden, 1), Linear(hidden, 1)

    def forward(self, p: Tensor, blocks: list[Tensor], past: Past) -> Tensor:
        h = mix(p, blocks, self.self_attention_res_norm, self.self_attention_res_proj)
        if self.starts:
            blocks.append(p)
        y = self.self_attn(self.input_layernorm(h), self.layer, past)
        p = y if self.starts else p + y
        h = mix(p, blocks, self.mlp_res_norm, self.mlp_res_proj)
        forward = self.get_submodule(*self.feed_forward)
        return p + forward(self.post_attention_layernorm(h))  # type: ignore[no-any-return]


class Embedding(Weight):
    def forward(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        return F.embedding(tokens, self.weight).to(dtype)


class Backbone(nn.Module):
    def __init__(self, c: Config, kind: type[nn.Module]) -> None:
        super().__init__()
        hidden, eps = c["hidden_size"], c["rms_norm_eps"]
        self.embed_tokens = Embedding(c["vocab_size"], hidden)
        self.layers = nn.ModuleList(Layer(c, i, kind) for i in range(c["num_hidden_layers"]))
        self.output_attn_res_norm, self.output_attn_res_proj = Norm(hidden, eps), Linear(hidden, 1)
        self.norm = Norm(hidden, eps)

    def forward(self, tokens: Tensor, past: Past, dtype: torch.dtype) -> Tensor:
        p, blocks = self.embed_tokens(tokens, dtype), list[Tensor]()
        for layer in self.layers:
            p = layer(p, blocks, past)
        return self.norm(mix(p, blocks, self.output_attn_res_norm, self.output_attn_res_proj))  # type: ignore[no-any-return]


class K3(nn.Module):
    """Logits [T, V] of ``tokens`` [T] that follow ``past``, or of the last alone.  ``kind``: class
    of the experts' projections."""

    def __init__(self, c: Config, kind: type[nn.Module] = Mxfp4Linear) -> None:
        super().__init__()
        self.model = Backbone(c, kind)
        self.lm_head = Linear(c["hidden_size"], c["vocab_size"])

    def forward(
        self, tokens: Tensor, past: Past, dtype: torch.dtype = torch.bfloat16, last: bool = False
    ) -> Tensor:
        x = self.model(tokens, past, dtype)
        return self.lm_head(x[-1:] if last else x)  # type: ignore[no-any-return]

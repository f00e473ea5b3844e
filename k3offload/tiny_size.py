"""The sizes and variants a synthetic checkpoint can have, and which combinations make sense.

Knows numbers only: nothing of tensors, values or files.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final

from .errors import UsageError

GROUP: Final = 32  # input columns that share one E8M0 scale
#: dt_bias ranges: decay exp(-5 sigmoid(e^A (f + dt))); "mid" remembers 1 to 100s of tokens.
DECAY_RANGE: Final = {"mid": (-4, 0), "slow": (-9, -6), "fast": (1, 4)}
CHOICES: Final = {
    "decay": tuple(DECAY_RANGE),
    "expert_mode": ("gauss", "bytes"),
    "expert_format": ("mxfp4", "bf16"),
    "activation": ("situ", "silu"),
    "family": ("kimi_k3", "kimi_linear"),
}


@dataclass(frozen=True)
class TinySize:
    """Every size and variant of a synthetic checkpoint.

    0 means "the model has none" for ``q_lora`` (q_proj directly), ``latent`` (experts on the
    full width), ``shared`` (no shared expert) and ``attn_res`` (plain residual).  ``mla_layers``
    (0-based) defaults to every fourth layer and always the last, as in the release.
    """

    hidden: int
    layers: int
    heads: int
    kda_heads: int
    kda_dim: int
    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    vdim: int
    experts: int
    topk: int
    latent: int
    moe_inter: int
    shared: int
    dense_inter: int
    attn_res: int
    vocab: int
    expert_mode: str = "gauss"  # "bytes": uniform codes, fast
    probe_eps: bool = False  # tiny activations wherever an epsilon is added
    edge_scales: bool = False  # E8M0 bytes 0, 1 and 254 among the experts
    tame: float = 1.0  # gain of every sublayer's output; 0.15 does not amplify rounding
    decay: str = "mid"
    vision: bool = True
    expert_format: str = "mxfp4"  # or "bf16"
    full_rank_gate: bool = True  # False: g_b_proj(g_a_proj x)
    bounded_decay: bool = True  # False: the softplus form
    mla_gate: bool = True
    latent_norm: bool = True
    activation: str = "situ"  # or "silu"
    conv: int = 4
    scale: float = 1.0  # routed_scaling_factor
    renormalize: bool = True
    mla_layers: tuple[int, ...] | None = None
    family: str = "kimi_k3"  # or "kimi_linear": flat config, no name prefix

    @property
    def prefix(self) -> str:
        """What every text tensor's name begins with."""
        return "language_model." if self.family == "kimi_k3" else ""

    @property
    def mla(self) -> tuple[int, ...]:
        """0-based indices of the MLA layers."""
        if self.mla_layers is not None:
            return self.mla_layers
        return tuple(i for i in range(self.layers) if i % 4 == 3 or i == self.layers - 1)


_NANO: Final = TinySize(
    hidden=128, layers=9, heads=4, kda_heads=4, kda_dim=32, q_lora=96, kv_lora=64, nope=32,
    rope=16, vdim=32, experts=16, topk=4, latent=64, moe_inter=96, shared=2, dense_inter=320,
    attn_res=4, vocab=512,
)  # fmt: skip
_STREAM: Final = TinySize(
    hidden=1024, layers=9, heads=8, kda_heads=8, kda_dim=64, q_lora=256, kv_lora=128, nope=64,
    rope=32, vdim=64, experts=896, topk=16, latent=1024, moe_inter=1024, shared=2,
    dense_inter=2048, attn_res=4, vocab=4096, expert_mode="bytes",
)  # fmt: skip
SIZES: Final = {
    # Every equality of the release kept: KDA heads = MLA heads, nope = v = KDA head dim.
    "nano": _NANO,
    "small": TinySize(
        hidden=512, layers=17, heads=8, kda_heads=8, kda_dim=64, q_lora=192, kv_lora=128,
        nope=64, rope=32, vdim=64, experts=64, topk=8, latent=256, moe_inter=192, shared=2,
        dense_inter=1536, attn_res=6, vocab=4096,
    ),
    # Every accidental equality broken, to catch two sizes being mixed up.
    "odd": TinySize(
        hidden=160, layers=11, heads=6, kda_heads=3, kda_dim=40, q_lora=88, kv_lora=72, nope=24,
        rope=8, vdim=56, experts=24, topk=5, latent=96, moe_inter=64, shared=3, dense_inter=200,
        attn_res=3, vocab=640,
    ),
    # The released width of every matrix but the vocabulary, 4 layers, few experts: 6.7 GB.
    "wide": TinySize(
        hidden=7168, layers=4, heads=96, kda_heads=96, kda_dim=128, q_lora=1536, kv_lora=512,
        nope=128, rope=64, vdim=128, experts=24, topk=16, latent=3584, moe_inter=3072, shared=2,
        dense_inter=33792, attn_res=12, vocab=2048,
    ),
    # Streaming: 8 MoE layers of 896 experts of 1.67 MB = 12.0 GB beside a small trunk.
    "io": _STREAM,
    # The older sibling, every part of K3 that it lacks switched off.
    "kimi-linear": dataclasses.replace(
        _NANO, q_lora=0, latent=0, shared=1, attn_res=0, scale=2.446, expert_format="bf16",
        full_rank_gate=False, bounded_decay=False, mla_gate=False, activation="silu",
        vision=False, family="kimi_linear",
    ),
    # Streaming with the released expert (17.55 MB): 6 x 112 experts = 11.8 GB.
    "io-real": dataclasses.replace(_STREAM, layers=7, experts=112, latent=3584, moe_inter=3072),
}  # fmt: skip


def tiny_size(size: str = "nano", **overrides: Any) -> TinySize:
    """A named size with single fields overridden (None: as named).

    Raises ``UsageError`` for a name, field or combination that cannot be made.
    """
    if size not in SIZES:
        raise UsageError(f"There is no size {size!r}.", f"Choose one of {', '.join(SIZES)}.")
    known = {field.name for field in dataclasses.fields(TinySize)}
    for name in overrides:
        if name not in known:
            raise UsageError(
                f"{name!r} is no size or option.", f"Known: {', '.join(sorted(known))}."
            )
    given = {name: value for name, value in overrides.items() if value is not None}
    made = dataclasses.replace(SIZES[size], **given)
    _check(made)
    return made


def _check(s: TinySize) -> None:
    none_allowed = {"q_lora", "latent", "shared", "attn_res"}
    for field in dataclasses.fields(TinySize):
        value = getattr(s, field.name)
        least = 0 if field.name in none_allowed else 1
        if field.type == "int" and (not isinstance(value, int) or value < least):
            raise UsageError(f"{field.name} = {value!r} is too small.", f"Use {least} or more.")
    for name, choices in CHOICES.items():
        if getattr(s, name) not in choices:
            raise UsageError(f"{name} = {getattr(s, name)!r}.", f"One of {', '.join(choices)}.")
    io = s.latent or s.hidden
    rules = (
        (s.vocab >= 512, f"vocab = {s.vocab} is too small.", "256 bytes and 256 specials: 512."),
        (s.topk <= s.experts, f"topk {s.topk} exceeds experts {s.experts}.", "Lower topk."),
        (
            all(0 <= i < s.layers for i in s.mla),
            f"mla_layers {s.mla} names a layer outside 0..{s.layers - 1}.",
            "Layers count from 0.",
        ),
        (
            s.family == "kimi_k3" or not (s.attn_res or s.latent or s.vision or s.mla_gate),
            "Kimi Linear has no AttnRes, latent, MLA gate or vision.",
            "Start from --size kimi-linear.",
        ),
        (
            io % GROUP == 0 and s.moe_inter % GROUP == 0,
            f"Expert widths {io} and {s.moe_inter} are not multiples of {GROUP}.",
            f"Scales cover {GROUP} columns each.",
        ),
    )
    for fine, problem, remedy in rules:
        if not fine:
            raise UsageError(problem, remedy)

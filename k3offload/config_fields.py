"""Reading one JSON object of a model's configuration, strictly: types, ranges, unknown keys.

This file knows which keys a ``config.json`` may carry and which of them cannot change the
computation.  It does not know what the used keys mean together; ``spec.py`` does.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from .errors import ConfigError
from .paths import link_target, show_path

ANY: Final = object()  #: an inert key may hold any value
CONFIG_LIMIT: Final = 16_000_000  #: bytes; a larger config.json is not a configuration
REQUIRED: Final = object()

_REMEDY = "Use the config.json that belongs to this checkpoint, as it was released."
_UNKNOWN = (
    "This version cannot tell whether the field changes the computation, so it does not guess; "
    "use a version that knows the field, or the config.json as it was released."
)

#: Keys that never change the forward pass, with the values under which that is true.
#: The long tail is what transformers writes into every configuration.
INERT: Final[Mapping[str, Any]] = {
    # provenance, remote code (never run), number formats (the tensor headers decide)
    "_name_or_path": ANY, "_attn_implementation": ANY, "attn_implementation": ANY,
    "_commit_hash": ANY, "auto_map": ANY, "transformers_version": ANY, "tokenizer_class": ANY,
    "dtype": ("bfloat16", "float16", "float32", None),
    "torch_dtype": ("bfloat16", "float16", "float32", None),
    # markers of the chat and image front ends
    "ignore_index": ANY, "image_placeholder": ANY, "media_placeholder_token_id": ANY,
    "sep_token_id": ANY, "decoder_start_token_id": ANY, "prefix": ANY,
    # training only
    "initializer_range": ANY, "attention_dropout": ANY, "output_router_logits": ANY,
    "aux_loss_alpha": ANY, "router_aux_loss_coef": ANY, "seq_aux": ANY,
    # layer kinds that no K3 layer has
    "attention_bias": (False, None), "mlp_bias": (False, None), "pretraining_tp": (1, None),
    "num_nextn_predict_layers": (0, None), "num_mtp_layers": (0, None),
    "moe_router_activation_func": ("sigmoid",), "scoring_func": ("sigmoid", None),
    "topk_method": ("noaux_tc",), "rope_scaling": (None,), "rope_theta": ANY, "head_dim": ANY,
    "sliding_window": (None,), "add_cross_attention": (False,), "is_encoder_decoder": (False,),
    "cross_attention_hidden_size": (None,), "pruned_heads": ({},), "tie_encoder_decoder": (False,),
    "chunk_size_feed_forward": (0,), "is_decoder": ANY, "use_cache": ANY, "use_bfloat16": ANY,
    # what transformers returns, and how it labels classes
    "output_attentions": ANY, "output_hidden_states": ANY, "output_scores": ANY,
    "return_dict": ANY, "return_dict_in_generate": ANY, "torchscript": ANY, "tf_legacy_loss": ANY,
    "id2label": ANY, "label2id": ANY, "problem_type": ANY, "finetuning_task": ANY,
    "task_specific_params": (None, {}),
    # generic defaults of sampling; ours are flags, so these may not ask for anything else
    "do_sample": ANY, "temperature": ANY, "top_k": ANY, "top_p": ANY, "max_length": ANY,
    "typical_p": (1.0,), "min_length": (0,), "repetition_penalty": (1.0,), "num_beams": (1,),
    "num_beam_groups": (1,), "diversity_penalty": (0.0,), "length_penalty": ANY,
    "early_stopping": ANY, "num_return_sequences": (1,), "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,), "bad_words_ids": (None,), "suppress_tokens": (None,),
    "begin_suppress_tokens": (None,), "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "exponential_decay_length_penalty": (None,), "remove_invalid_values": (False,),
}  # fmt: skip

_GROUP_WEIGHTS: Final[Mapping[str, Any]] = {
    "num_bits": (4,), "type": ("float",), "symmetric": (True,), "strategy": ("group",),
    "group_size": (32,), "dynamic": (False,), "scale_dtype": ("torch.uint8", None),
    "zp_dtype": (None,), "actorder": (None,), "block_structure": (None,),
    "observer": ANY, "observer_kwargs": ANY,
}  # fmt: skip
_GROUP_KEYS: Final[Mapping[str, Any]] = {
    "format": ("mxfp4-pack-quantized", None), "targets": ANY,
    "input_activations": (None,), "output_activations": (None,),
}  # fmt: skip
_QUANT_KEYS: Final[Mapping[str, Any]] = {
    "quant_method": ("compressed-tensors",), "format": ("mxfp4-pack-quantized",),
    "quantization_status": ("compressed", None), "kv_cache_scheme": (None,),
    "global_compression_ratio": ANY, "ignore": ANY, "version": ANY,
    "sparsity_config": (None, {}), "transform_config": (None, {}),
}  # fmt: skip


def same(value: object, allowed: object) -> bool:
    """Equality of JSON values: ``true`` is not ``1``, but ``1`` is ``1.0``."""
    if isinstance(value, bool) or isinstance(allowed, bool):
        return value is allowed
    return value == allowed


def show(value: object) -> str:
    """A JSON value as an error message quotes it, cut to 60 characters."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = repr(type(value).__name__)
    return text if len(text) <= 60 else text[:57] + "..."


class Fields:
    """One JSON object being read; remembers which keys were used.

    ``where`` is how the object is named in messages, e.g. ``config.json: text_config.``.
    Every getter raises ``ConfigError`` that names the field and its value.
    """

    def __init__(self, raw: object, where: str) -> None:
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{where.rstrip('.')} must be an object, not {show(raw)}.", _REMEDY)
        self.raw: Mapping[str, Any] = raw
        self.where = where
        self.used: set[str] = set()
        self.inert: list[str] = []

    def bad(self, name: str, problem: str) -> ConfigError:
        """The error for field ``name``: what is wrong with it, and its value."""
        return ConfigError(f"{self.where}{name} = {show(self.raw.get(name))}: {problem}", _REMEDY)

    def get(self, name: str, default: object = REQUIRED, aliases: tuple[str, ...] = ()) -> Any:
        """The value under ``name`` or one of its aliases, which must agree when several are set."""
        found = [key for key in (name, *aliases) if key in self.raw]
        self.used.update(found)
        set_keys = [key for key in found if self.raw[key] is not None]
        for key in set_keys[1:]:
            if not same(self.raw[key], self.raw[set_keys[0]]):
                first = set_keys[0]
                raise self.bad(key, f"contradicts {first} = {show(self.raw[first])}.")
        if set_keys:
            return self.raw[set_keys[0]]
        if default is REQUIRED:
            if found:
                raise self.bad(found[0], "must be set.")
            raise ConfigError(f"{self.where}{name} is missing.", _REMEDY)
        return default

    def name_of(self, name: str, aliases: tuple[str, ...]) -> str:
        return next((k for k in (name, *aliases) if self.raw.get(k) is not None), name)

    def integer(
        self,
        name: str,
        default: object = REQUIRED,
        *,
        low: int = 1,
        high: int = 1 << 24,
        aliases: tuple[str, ...] = (),
    ) -> Any:
        """An integer in ``low..high``; ``default`` (returned as it is) when absent or null."""
        value = self.get(name, default, aliases)
        if value is default:
            return value
        key = self.name_of(name, aliases)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.bad(key, "must be a whole number.")
        if not low <= value <= high:
            raise self.bad(key, f"must lie in {low} to {high}.")
        return value

    def number(
        self,
        name: str,
        default: object = REQUIRED,
        *,
        low: float = 0.0,
        high: float = 1e6,
        aliases: tuple[str, ...] = (),
    ) -> Any:
        """A finite number with ``low < value <= high``; ``default`` when absent or null."""
        value = self.get(name, default, aliases)
        if value is default:
            return value
        key = self.name_of(name, aliases)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.bad(key, "must be a number.")
        if not low < value <= high:  # NaN fails both comparisons
            raise self.bad(key, f"must be above {low:g} and at most {high:g}.")
        return float(value)

    def flag(self, name: str, default: object = REQUIRED, aliases: tuple[str, ...] = ()) -> bool:
        """``true`` or ``false``."""
        value = self.get(name, default, aliases)
        if not isinstance(value, bool):
            raise self.bad(self.name_of(name, aliases), "must be true or false.")
        return value

    def choice(self, name: str, allowed: tuple[str, ...], default: object = REQUIRED) -> str:
        """One of the strings ``allowed``."""
        value = self.get(name, default)
        if value not in allowed or not isinstance(value, str):
            raise self.bad(name, f"is not known; known: {', '.join(allowed)}.")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """No, one or several token ids."""
        value = self.get(name, None)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 1 << 31:
                raise self.bad(name, "must be a token id, a list of them, or null.")
        return tuple(ids)

    def finish(self, inert: Mapping[str, Any]) -> None:
        """Refuse every key that was neither used nor is inert with the value it has.

        An unknown key that is null asks for nothing, so it counts as inert.
        """
        for name, value in self.raw.items():
            if name in self.used:
                continue
            if name in inert:
                allowed = inert[name]
                if allowed is not ANY and not any(same(value, a) for a in allowed):
                    known = " or ".join(show(a) for a in allowed)
                    raise self.bad(name, f"this computation is not known; known: {known}.")
                _check_finite(value, f"{self.where}{name}")
            elif value is not None:
                raise ConfigError(f"{self.where}{name} = {show(value)} is not known.", _UNKNOWN)
            self.inert.append(self.where.partition(": ")[2] + name)


def _check_finite(value: object, where: str) -> None:
    """NaN and infinities are no JSON and never meant."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where} is not a finite number.", _REMEDY)


def check_quantization(raw: object, where: str) -> None:
    """Refuse any quantization other than MXFP4 weights in groups of 32 with byte scales.

    Which tensors are packed is decided by their names in the files; the ``ignore`` patterns do not
    say it (two released linears are matched by no pattern and are stored as plain BF16).
    """
    quant = Fields(raw, where)
    groups = quant.get("config_groups")
    for key in ("quant_method", "format"):
        quant.get(key)
        quant.used.discard(key)  # required, and still checked against the table
    if not isinstance(groups, dict) or not groups:
        raise quant.bad("config_groups", "must hold at least one group.")
    for name, group in groups.items():
        fields = Fields(group, f"{where}config_groups.{name}.")
        weights = Fields(fields.get("weights"), f"{fields.where}weights.")
        for key in ("num_bits", "type", "strategy", "group_size"):
            weights.get(key)
            weights.used.discard(key)
        weights.finish(_GROUP_WEIGHTS)
        fields.finish(_GROUP_KEYS)
    quant.finish(_QUANT_KEYS)


def no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For ``json.loads(object_pairs_hook=...)``: raises ``ValueError`` when a key stands twice."""
    out = dict(pairs)
    if len(out) != len(pairs):
        keys = sorted(key for key, _ in pairs)
        twice = next(key for key, other in itertools.pairwise(keys) if key == other)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return out


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a number JSON knows")


def read_json(path: Path, limit: int = CONFIG_LIMIT) -> dict[str, Any]:
    """A small JSON object from ``path``: at most ``limit`` bytes, no key twice, no NaN.

    Raises ``ConfigError`` that names the file, also when it is missing.
    """
    shown = show_path(path)
    if link_target(path) != path:
        shown += f" -> {show_path(link_target(path))}"
    try:
        if not path.is_file():  # opening a pipe would wait for a writer
            os.stat(path)
            raise OSError(None, "it is not a file")
        with open(path, "rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise ConfigError(
            f"{shown} cannot be read: {error.strerror}.",
            "Point at the folder that holds it, or copy it from the released checkpoint; "
            "the architecture is never guessed.",
        ) from None
    if len(data) > limit:
        raise ConfigError(f"{shown} is larger than {limit} bytes.", _REMEDY)
    try:
        value = json.loads(
            data.decode("utf-8-sig"), object_pairs_hook=no_key_twice, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        detail = "too deeply nested" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"{shown} is not valid JSON: {detail}.", _REMEDY) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{shown} does not hold a JSON object.", _REMEDY)
    return value

"""What requests of both kinds have in common: sampling, room in the context, usage, scores."""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from dataclasses import dataclass
from typing import Any

from .engine import Engine
from .errors import TooLong
from .sampling import Sampling
from .serve_errors import UnknownModel
from .serve_job import Ended, Score
from .serve_schema import Common
from .serve_settings import Settings
from .session_identity import computed_by, identity


@dataclass(frozen=True)
class Served:
    """The model behind the server, and what its answers say of it."""

    engine: Engine
    settings: Settings
    fingerprint: str

    @classmethod
    def of(cls, engine: Engine, settings: Settings) -> Served:
        told = json.dumps((identity(engine), computed_by(engine)), sort_keys=True, default=str)
        return cls(engine, settings, f"k3_{hashlib.sha256(told.encode()).hexdigest()[:12]}")

    @property
    def context(self) -> int:
        """Tokens of a prompt and its answer, at most."""
        return min(self.engine.options.context, self.engine.spec.context)

    def check_model(self, name: str) -> None:
        """Raise ``UnknownModel`` for a name that is not this one's; none means it, too."""
        if name and name != self.settings.model:
            raise UnknownModel(
                f"There is no model {name!r:.80} here.", f"Ask for {self.settings.model!r}."
            )

    def most(self, prompt: int, asked: int | None, usual: int | None) -> int:
        """New tokens after ``prompt`` tokens: as many as are ``asked`` for, or as is usual and as
        there is room for.  Raises ``TooLong`` with the counts, before anything is computed."""
        room = self.context - prompt
        if room < 1:
            raise TooLong(
                f"The prompt has {prompt:,} tokens, and the context {self.context:,}, one of them "
                "for the answer.",
                "Shorten the prompt, or start the server with a larger --context.",
            )
        if asked is None:
            return min(usual or self.settings.max_new_tokens, room)
        if asked > room:
            raise TooLong(
                f"max_tokens is {asked:,}, the prompt has {prompt:,} tokens, and both together are "
                f"more than the context of {self.context:,}.",
                f"Ask for {room:,} at most.",
            )
        return asked

    def head(self, kind: str, request: str, created: int) -> dict[str, Any]:
        """How every object of an answer begins."""
        return {
            "id": request,
            "object": kind,
            "created": created,
            "model": self.settings.model,
            "system_fingerprint": self.fingerprint,
        }


def new_id(kind: str) -> str:
    """``chatcmpl-...``"""
    return f"{kind}-{uuid.uuid4().hex}"


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())


def samplings(body: Common, **more: Any) -> tuple[Sampling, ...]:
    """One for each answer; the first has the seed that is asked for, the next the next one."""
    seeds = [None if body.seed is None else body.seed + i for i in range(body.n)]
    return tuple(
        Sampling(
            temperature=body.temperature, top_k=body.top_k, top_p=body.top_p, min_p=body.min_p,
            seed=seed, **more,
        )
        for seed in seeds
    )  # fmt: skip


def usage(prompt: int, ended: Ended) -> dict[str, Any]:
    """Tokens of a request; those of its prompt count once for all answers."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": ended.tokens,
        "total_tokens": prompt + ended.tokens,
        "prompt_tokens_details": {"cached_tokens": ended.reused},
        "completion_tokens_details": {"reasoning_tokens": ended.reasoning},
    }


def spelled(engine: Engine, token: int) -> tuple[str, bytes]:
    """``token`` as text, and its bytes, which may be a part of a character."""
    data = engine.tokenizer.token_bytes(token)
    return data.decode("utf-8", "replace"), data


def chat_logprob(engine: Engine, score: Score) -> dict[str, Any]:
    """A token's probability as chat completions tell it."""

    def told(token: int, logprob: float) -> dict[str, Any]:
        text, data = spelled(engine, token)
        return {"token": text, "logprob": logprob, "bytes": list(data)}

    top = [told(token, logprob) for token, logprob in score.top]
    return {**told(score.token, score.logprob), "top_logprobs": top}

"""Completions: a text, or tokens, that the model goes on with."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from .chat_parse import Content, Finish
from .errors import TokenizerError, UsageError
from .serve_ask import Served, new_id, now, samplings, spelled, usage
from .serve_job import Ask, Ended, Score, Step, TextReader
from .serve_schema import CompletionRequest
from .session import checked_ids


def ask(served: Served, body: CompletionRequest) -> Ask:
    """What ``body`` asks of the engine.  Raises ``UsageError`` that begins with a field's name."""
    served.check_model(body.model)
    engine = served.engine
    try:
        if isinstance(body.prompt, str):
            prompt = engine.encode(body.prompt)
        else:
            prompt = checked_ids(body.prompt, engine.spec.vocab)
    except (UsageError, TokenizerError) as error:
        raise UsageError(f"prompt: {error.problem}", error.remedy) from None
    if not prompt:
        raise UsageError("prompt is empty.", "Give text, or tokens.")
    return Ask(
        id=new_id("cmpl"),
        kind="completion",
        prompt=prompt,
        most=served.most(len(prompt), body.most, body.usual_tokens),
        samplings=samplings(body, ignore_end=body.ignore_eos),
        reader=partial(TextReader, engine.tokenizer, body.stops),
        scored=body.logprobs,
    )


class CompletionWriter:
    """The answer to one request, whole or in chunks."""

    def __init__(self, served: Served, ask: Ask, body: CompletionRequest) -> None:
        self._served, self._ask = served, ask
        self._usage = body.stream_options is not None and body.stream_options.include_usage
        self._created = now()
        self._offsets = [0] * len(ask.samplings)
        utf8 = codecs.getincrementaldecoder("utf-8")
        self._decoders = [utf8("replace") for _ in ask.samplings]

    def begin(self) -> Iterator[Any]:
        return iter(())

    def step(self, step: Step) -> Iterator[Any]:
        text = "".join(event.text for event in step.events if isinstance(event, Content))
        reason = next((e.reason for e in step.events if isinstance(e, Finish)), None)
        choice = self._choice(step.choice, text, step.scores, reason)
        made = {**self._head(), "choices": [choice]}
        yield {**made, "usage": None} if self._usage else made

    def end(self, ended: Ended) -> Iterator[Any]:
        if self._usage:
            used = usage(len(self._ask.prompt), ended)
            yield {**self._head(), "choices": [], "usage": used}

    def whole(self, steps: Sequence[Step], ended: Ended) -> dict[str, Any]:
        choices = []
        for index in range(len(self._ask.samplings)):
            mine = [step for step in steps if step.choice == index]
            events = [event for step in mine for event in step.events]
            text = "".join(event.text for event in events if isinstance(event, Content))
            scores = [score for step in mine for score in step.scores]
            reason = next((e.reason for e in events if isinstance(e, Finish)), None)
            choices.append(self._choice(index, text, scores, reason))
        return {**self._head(), "choices": choices, "usage": usage(len(self._ask.prompt), ended)}

    def _choice(
        self, index: int, text: str, scores: Sequence[Score], reason: str | None
    ) -> dict[str, Any]:
        logprobs = self._logprobs(index, scores) if self._ask.scored is not None else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, index: int, scores: Sequence[Score]) -> dict[str, Any]:
        engine, offsets = self._served.engine, []
        tokens = [spelled(engine, score.token) for score in scores]
        for _, data in tokens:  # several may be parts of one character
            offsets.append(self._offsets[index])
            self._offsets[index] += len(self._decoders[index].decode(data))
        return {
            "tokens": [text for text, _ in tokens],
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": [
                {spelled(engine, token)[0]: logprob for token, logprob in reversed(score.top)}
                for score in scores
            ],
            "text_offset": offsets,
        }

    def _head(self) -> dict[str, Any]:
        return self._served.head("text_completion", self._ask.id, self._created)

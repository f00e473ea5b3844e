"""Records of a batch in the shape of an output line of OpenAI's Batch API.

    {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error": null}

``body`` is a completion object, or that of a chat completion for a chat.  A document that failed
has no response, and an ``error`` with ``code`` and ``message``, as requests have there that never
ran.  What a resumed run needs stands beside these (``digest``, ``retry``, and ``id`` is that of the
document, which ``custom_id`` repeats), and so do ``timing`` and what labels scored.  This file
knows records as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

NAME: Final = "openai"  #: of this shape, among output formats
_BESIDE: Final = ("label", "scores", "timing", "retry")


def openai_line(record: Mapping[str, Any], model: str, created: int) -> dict[str, Any]:
    """``record`` in that shape; ``created``: seconds since 1970.

    Identifiers are made of the digest, so a document gets the same in every run.
    """
    error = record["error"]
    line: dict[str, Any] = {
        "id": record["id"],
        "digest": record["digest"],
        "custom_id": record["id"],
        "response": None if error else _response(record, model, created),
        "error": error and {"code": error["type"], "message": _sentences(error)},
    }
    return line | {name: record[name] for name in _BESIDE if name in record}


def _sentences(error: Mapping[str, str]) -> str:
    return f"{error['problem']} {error['remedy']}".strip()


def _response(record: Mapping[str, Any], model: str, created: int) -> dict[str, Any]:
    short, usage = record["digest"][:32], record["usage"]
    # its word for an answer that is complete, as a label is
    reason = "stop" if record["finish_reason"] == "label" else record["finish_reason"]
    choice = {"index": 0, "logprobs": None, "finish_reason": reason}
    if (message := record.get("message")) is None:
        kind, choice["text"] = ("cmpl", "text_completion"), record["text"]
    else:
        kind, choice["message"] = ("chatcmpl", "chat.completion"), _message(message, short)
    body = {
        "id": f"{kind[0]}-{short}",
        "object": kind[1],
        "created": created,
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["new_tokens"],
            "total_tokens": usage["prompt_tokens"] + usage["new_tokens"],
            "prompt_tokens_details": {"cached_tokens": usage["reused_tokens"]},
        },
    }
    return {"status_code": 200, "request_id": f"req_{short}", "body": body}


def _message(message: Mapping[str, Any], short: str) -> dict[str, Any]:
    """``message`` as it stands there: no content is null, and no two calls have one id."""
    calls = [
        {**call, "id": f"call_{short}_{i}"} for i, call in enumerate(message.get("tool_calls", []))
    ]
    made = {**message, "content": message["content"] or None if calls else message["content"]}
    return {**made, "refusal": None, **({"tool_calls": calls} if calls else {})}

"""A model folder that can chat: the embedded vocabulary, and wording of our own."""

from __future__ import annotations

from pathlib import Path

from k3offload.chat import Encoder
from k3offload.tokenizer import Tokenizer
from tests.helpers_tokenizer import NANO, Spec

TOKENIZER = Tokenizer.load(NANO, Spec(2304, 2048, (2050,)))
BASE = 2048  #: the first special id
OPEN, CLOSE, SEP, END = BASE + 3, BASE + 4, BASE + 5, BASE + 2

#: As the released file is built: which call, which branch, which assignment; other words.
#: Whoever runs it leaves a file behind.
WORDING = '''
"""Rendering."""
import json, pathlib

pathlib.Path(__file__).with_name("ran").write_text("ran")
EFFORTS = {"low", "high", "max"}


def _compact(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _escape(value):
    return str(value).replace("&", "&amp;").replace('"', "&quot;")


def _system(kind: str, body: str) -> list:
    return [*_open("message", [("role", "system"), ("type", kind)]), body.strip()]


def _declare(tools, *, dynamic: bool = False):
    if dynamic:
        body = (
            "More tools\\n"
            "as follows.\\n\\n"
            f"{_compact(tools)}\\n"
            "end"
        )
    else:
        body = (
            "All tools:\\n"
            f"{_compact(tools)}\\n"
            "end"
        )
    segments: list = []
    segments.extend(_open("message", [("role", "system"), ("type", "tool-declare")]))
    segments.append(body)
    return segments


def build(messages, tools=None, *, thinking=True, **kwargs):
    segments = []
    if tools:
        segments.extend(_declare(tools))
    thinking_effort = kwargs.get("thinking_effort")
    if thinking and thinking_effort in EFFORTS:
        segments.extend(
            _system(
                "thinking-effort",
                "Think `this` "
                "much.\\n"
                f"Now: {thinking_effort}.",
            )
        )
    tool_choice = kwargs.get("tool_choice")
    if tool_choice == "required":
        segments.extend(_system("tool-choice", "Call one.\\n" "Now."))
    elif tool_choice == "none":
        segments.extend(_system("tool-choice", "Call none."))
    kind = kwargs.get("response_format")
    if kind == "json_object":
        segments.extend(_system("response-format", "Answer in JSON."))
    elif kind == "json_schema":
        schema = _compact(kwargs.get("schema"))
        segments.extend(_system("response-format", "Answer in JSON like\\n" f"{schema}\\nplease."))
    return segments
'''


def folder_with(folder: Path, wording: str = WORDING) -> Path:
    """``folder``, with ``wording`` as its encoding_k3.py."""
    (folder / "encoding_k3.py").write_text(wording, encoding="utf-8")
    return folder


def encoder(folder: Path | None = None) -> Encoder:
    return Encoder.of(TOKENIZER, folder)

"""A model folder that can chat, with wording of our own, and random conversations."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

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


# ---- tools ----


def tool(name: str, schema: Any = None, strict: Any = True) -> dict[str, Any]:
    """The declaration of a function."""
    function = {"name": name, "parameters": schema, "strict": strict}
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def arguments(required: Any = None, defs: Any = None, **properties: Any) -> dict[str, Any]:
    """The schema of ``properties`` and no others; all are required unless said."""
    required = list(properties) if required is None else required
    made = {"type": "object", "properties": properties, "required": required}
    return {**made, "additionalProperties": False, **({"$defs": defs} if defs else {})}


# ---- random trees of messages ----

SPELLED = sorted(TOKENIZER.specials)
TEXT = st.lists(
    st.one_of(
        st.sampled_from(SPELLED),
        st.sampled_from(["<|", "|>", "open", '="', "&quot;", "message", "\n", " ", '"', "🜁", "道"]),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    ),
    max_size=6,
).map("".join)
NAME = TEXT.filter(bool)
VALUE = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        TEXT,
        st.floats(-1e300, 1e300),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
CALL = st.builds(
    lambda name, arguments: {"function": {"name": name, "arguments": arguments}},
    NAME,
    st.dictionaries(TEXT, VALUE, max_size=3) | NAME.filter(lambda t: _is_no_json(t)),
)
ASSISTANT = st.builds(
    lambda reasoning, content, calls, results: [
        {
            "role": "assistant",
            "reasoning_content": reasoning,
            "content": content,
            "tool_calls": calls,
        },
        *({"role": "tool", "content": text} for _, text in zip(calls, results, strict=False)),
    ],
    TEXT,
    st.none() | TEXT,
    st.lists(CALL, max_size=2),
    st.lists(TEXT, max_size=2),
)
PLAIN = st.builds(
    lambda role, content, name: [{"role": role, "content": content, "name": name}],
    st.sampled_from(["user", "system"]),
    TEXT | st.lists(TEXT.map(lambda t: {"type": "text", "text": t}), max_size=3),
    TEXT,
)
TREE = st.lists(PLAIN | ASSISTANT, min_size=1, max_size=4).map(lambda runs: [*chain(*runs)])


def _is_no_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return bool(text.strip())
    return False

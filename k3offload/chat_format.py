"""The markup of K3's chat format: elements, attributes, and the segments they are encoded in.

    <|open|>message role="user"<|sep|>Hello<|close|>message<|sep|><|end_of_msg|>

The four markers are single tokens of the vocabulary; everything between them is text.  A segment
is one or the other, and each segment is encoded alone: its edges are edges of tokens.  This file
knows how elements are written and how the text of a tag is read back; which elements a
conversation has is known by ``chat`` and ``chat_parse``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple, Protocol

from .errors import UsageError

OPEN: Final = "<|open|>"
CLOSE: Final = "<|close|>"
SEP: Final = "<|sep|>"
END: Final = "<|end_of_msg|>"

#: Every element of the format.
TAGS: Final = ("message", "think", "response", "tools", "call", "argument", "json")
LONGEST_TAG: Final = 4096  #: characters between two markers that can still be a tag

_ATTRIBUTE = re.compile(r'\s+(\w+)\s*=\s*"([^"]*)"')
#: What can still become attributes; the last of them may be cut anywhere.
_ATTRIBUTES_BEGUN = re.compile(r'(?:\s+\w+\s*=\s*"[^"]*")*(?:\s+(?:\w+\s*(?:=\s*(?:"[^"]*)?)?)?)?')


class Vocabulary(Protocol):
    """The part of a tokenizer that has the markers."""

    specials: dict[str, int]


class Marks(NamedTuple):
    """Token ids of the markers."""

    open: int
    close: int
    sep: int
    end: int

    @classmethod
    def of(cls, tokenizer: Vocabulary) -> Marks:
        """Raises ``UsageError`` for a vocabulary that lacks one: its model has another format."""
        names = (OPEN, CLOSE, SEP, END)
        if absent := [name for name in names if name not in tokenizer.specials]:
            raise UsageError(
                f"The model's vocabulary has no token {absent[0]}, so it does not chat in the "
                "format of Kimi K3.",
                "Give the whole text as a prompt (generate).",
            )
        return cls(*(tokenizer.specials[name] for name in names))


class Segment(NamedTuple):
    """A marker, or text that is encoded by itself.  ``field``: whose text it is, for messages."""

    text: str
    marker: bool = False
    field: str = ""


class Attribute(NamedTuple):
    """``name="value"`` in an opening tag."""

    name: str
    value: str
    field: str = ""


def opened(tag: str, *attributes: Attribute) -> list[Segment]:
    """An opening tag.  An attribute is four segments, so that no value merges with a quote."""
    segments = [Segment(OPEN, True), Segment(tag)]
    for name, value, field in attributes:
        segments += [Segment(f" {name}"), Segment('="')]
        segments += [Segment(escaped(value), field=field), Segment('"')]
    return [*segments, Segment(SEP, True)]


def closed(tag: str) -> list[Segment]:
    """A closing tag."""
    return [Segment(CLOSE, True), Segment(tag), Segment(SEP, True)]


def escaped(value: str) -> str:
    """The value of an attribute as it is written."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescaped(text: str) -> str:
    """The value that ``text`` stands for."""
    return text.replace("&quot;", '"').replace("&amp;", "&")


class Tag(NamedTuple):
    """What stood between two markers."""

    name: str
    attributes: Mapping[str, str]


def read_tag(text: str) -> Tag | None:
    """The tag that ``text`` is, blanks around it or not; None for anything else."""
    name, rest = _split(text)
    whole = "".join(found[0] for found in _ATTRIBUTE.finditer(rest))
    if name not in TAGS or rest[len(whole) :].strip() or not rest.startswith(whole):
        return None
    return Tag(name, {n: unescaped(value) for n, value in _ATTRIBUTE.findall(rest)})


def may_be_tag(text: str, closing: bool) -> bool:
    """Whether ``text``, with more behind it, can be a tag."""
    name, rest = _split(text)
    if len(text) > LONGEST_TAG:
        return False
    if not rest:
        return any(tag.startswith(name) for tag in TAGS)
    return name in TAGS and bool(rest.isspace() if closing else _ATTRIBUTES_BEGUN.fullmatch(rest))


def _split(text: str) -> tuple[str, str]:
    text = text.lstrip()
    name = re.match("[a-z]*", text)
    assert name is not None
    return name[0], text[name.end() :]

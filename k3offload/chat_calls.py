"""What an answer that may or must call tools has to look like, as a grammar in K3's chat format.

All of the answer is in it from its content on: the content, the element of the calls, the end.
Knows the format's elements; which arguments a strict function admits is known by
``chat_arguments``.  Other functions have any arguments, each of a type that K3 knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from .chat_arguments import ANY_TEXT, TYPES, Arguments, Way, json_value, quoted
from .chat_format import LONGEST_TAG, Marks, escaped
from .constrain import Grammar
from .errors import UsageError

_LONGEST: Final = LONGEST_TAG // 2  #: characters of a name, as it is written in a tag
_QUOTE, _KEY, _TYPE = quoted('"'), quoted('argument key="'), quoted('" type="')


class Tool(NamedTuple):
    """A function that may be called.  ``strict``: its arguments must be those of ``parameters``;
    ``field``: where it stands in the request."""

    name: str
    strict: bool
    parameters: Any
    field: str


class Calls(NamedTuple):
    """A grammar, and the parts of it that are a user's, with their places."""

    grammar: Grammar
    parts: Sequence[tuple[str, Grammar]]


def tools_of(messages: Sequence[Mapping[str, Any]], tools: Any) -> list[Tool]:
    """All that a request declares, in ``tools`` and in messages of the system, which the encoder
    has checked.  Raises ``UsageError`` for a ``strict`` that cannot be."""
    declared = [("tools", tools)]
    declared += [(f"messages[{i}].tools", m.get("tools")) for i, m in enumerate(messages)]
    found: dict[str, Tool] = {}
    for place, some in declared:
        for i, tool in enumerate(some or ()):
            function, field = tool["function"], f"{place}[{i}].function"
            strict = function.get("strict")
            if strict is not None and not isinstance(strict, bool):
                raise UsageError(f"{field}.strict is {strict!r:.60}.", "It must be true or false.")
            name = function["name"]
            twice = found.get(name)
            if twice is not None and (twice.strict or strict):
                raise UsageError(
                    f"{field}.name is that of {twice.field} too, and one of them is strict.",
                    "Give each function a name of its own.",
                )
            found[name] = Tool(name, bool(strict), function.get("parameters"), field)
    return [*found.values()]


def calls_grammar(
    marks: Marks, tools: Sequence[Tool], *, content: bool, least: int, most: int | None
) -> Calls:
    """An answer from its content on, which is empty unless ``content``; then from ``least`` (0 or
    1) to ``most`` (0, 1, or None for any number) calls of ``tools``, and the end.

    Raises ``UsageError`` that begins with the field, for a name or schema that cannot be enforced.
    """
    rules = _Rules(marks)
    calls = "" if most == 0 else "calls" if least else "calls?"
    before = ANY_TEXT if content else ""
    rules.add("start", f"{before} {rules.close('response')} {calls} {rules.close('message')}")
    if most != 0:
        more = "further*" if most is None else ""
        rules.add("calls", f"{rules.open(quoted('tools'))} first {more} {rules.close('tools')}")
        made = [(_head(tool), rules.arguments(tool)) for tool in tools]
        # a grammar does not count, and nobody reads the numbers of further calls
        for name, index in (("first", quoted("1")), ("further", "INDEX")):
            ways = [f"{rules.open(f'{head} {index} {_QUOTE}')} {rest}" for head, rest in made]
            rules.add(name, " | ".join(ways))
    return Calls(Grammar.of_lark(rules.text()), rules.parts)


def _head(tool: Tool) -> str:
    """The tag of a call up to its index."""
    name = _name(tool.name, f"{tool.field}.name")
    return quoted(f'call tool="{name}" index="')


def _name(name: str, field: str) -> str:
    """``name`` as the value of an attribute, if a tag has room for it."""
    written = escaped(name)
    if len(written) > _LONGEST:
        raise UsageError(
            f"{field}: a name of {len(name):,} characters is longer than can be called.",
            "Give a shorter one.",
        )
    return written


class _Rules:
    """Rules of one grammar, and how its elements are written."""

    def __init__(self, marks: Marks) -> None:
        self._open, self._close, self._sep = (f"<[{mark}]>" for mark in marks[:3])
        self._rules = {"TEXT": "/(?s:.)+/", "INDEX": "/[2-9]|[1-9][0-9]{1,3}/"}
        self.parts: list[tuple[str, Grammar]] = []

    def add(self, name: str, body: str) -> str:
        self._rules[name] = body
        return name

    def text(self) -> str:
        return "\n".join(f"{name}: {body}" for name, body in self._rules.items())

    def open(self, tag: str) -> str:
        return f"{self._open} {tag} {self._sep}"

    def close(self, name: str) -> str:
        return f"{self._close} {quoted(name)} {self._sep}"

    def arguments(self, tool: Tool) -> str:
        """The rule for the arguments of ``tool`` and the end of its call."""
        if not tool.strict:
            return self._any()
        made = []
        if tool.parameters is not None:
            found = Arguments(tool.parameters, field := f"{tool.field}.parameters")
            for key, ways in found:
                rule = self._argument(quoted(_name(key, field)), ways)
                made.append(rule if key in found.required else f"{rule}?")
            self.parts += found.parts
        return self.add(f"args{len(self._rules)}", " ".join([*made, self.close("call")]))

    def _any(self) -> str:
        if "any" not in self._rules:
            self.add("KEY", '/([^"&]|&amp;|&quot;){1,200}/')
            kinds = [kind for kind in dict.fromkeys(TYPES.values()) if kind != "string"]
            ways = [Way(kind, json_value({"type": kind})) for kind in kinds]
            one = self._argument("KEY", [Way("string", ANY_TEXT), *ways])
            self.add("any", f"{one}* {self.close('call')}")
        return "any"

    def _argument(self, key: str, ways: Sequence[Way]) -> str:
        """The rule for an argument that is written in one of several ways."""
        made = []
        for kind, value, terminal in ways:
            if terminal:
                value = self.add(f"TEXT{len(self._rules)}", value)
            made.append(f"{quoted(kind)} {_QUOTE} {self._sep} {value} {self.close('argument')}")
        head = f"{self._open} {_KEY} {key} {_TYPE} ({' | '.join(made)})"
        return self.add(f"arg{len(self._rules)}", head)

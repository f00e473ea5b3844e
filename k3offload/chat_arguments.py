"""The arguments that a strict function admits, as K3 writes them: by name, each with its type.

Knows JSON schemas and how a value of each type is written: text as it is, all else as JSON.  What a
schema says that has no place in this form is refused by its place, and never passed over.  Knows
nothing of elements and tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from .chat_messages import json_type
from .constrain import BLANKS, Grammar
from .constrain_schema import DEFINITIONS, NOTES, SETTINGS, Schema, check_schema, parts
from .errors import UsageError

#: What the schema of all arguments may say beside notes.
_WHOLE: Final = ("$schema", "type", "properties", "required", "additionalProperties", *DEFINITIONS)
#: Keywords that may leave open of which type a value is.
_OPEN: Final = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
#: Types of JSON schemas, and how K3 calls them.
TYPES: Final = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "object",
    "array": "array",
}
_ASCII: Final = {
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[A-Za-z0-9_]",
    r"\W": "[^A-Za-z0-9_]",
}
_MOST: Final = 1000  #: ways to write one argument


class Way(NamedTuple):
    """A type that an argument may have, and what its value then is, as the right side of a rule;
    or of a terminal, which is text that must be there even where it is empty."""

    type: str
    value: str
    terminal: bool = False


class Arguments:
    """What a schema admits, in its order."""

    def __init__(self, schema: Any, field: str) -> None:
        """``field``: where ``schema`` stands in the request.  Raises ``UsageError`` for what is no
        plain list of arguments."""
        self._field, self.parts = field, list[tuple[str, Grammar]]()
        if not isinstance(schema, dict):
            raise UsageError(f"{field} is {schema!r:.60}.", "It must be an object.")
        try:
            check_schema(schema)
        except UsageError as error:
            raise UsageError(f"{field}: {error.problem}", error.remedy) from None
        for keyword in schema:
            if keyword not in _WHOLE and not _is_note(keyword):
                raise self._wrong("#", f"{keyword!r}, which is of all arguments together")
        if schema.get("type") != "object":
            raise self._wrong("#", f"the type {schema.get('type')!r:.40}, and arguments have names")
        if schema.get("additionalProperties") is not False:
            raise UsageError(
                f"{field}: without additionalProperties of false it admits arguments of any name.",
                "Set that, or leave strict out.",
            )
        self._given, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(self._given, dict) or not isinstance(required, list):
            raise self._wrong("#", "properties that are no object, or required that is no list")
        if absent := [k for k in required if not isinstance(k, str) or k not in self._given]:
            raise self._wrong("#", f"{absent[0]!r:.60} as required, and not as a property")
        self.required: Sequence[str] = required
        self._check_references(schema)
        self._shared = {key: schema[key] for key in DEFINITIONS if key in schema}

    def __iter__(self) -> Iterator[tuple[str, list[Way]]]:
        """The name of each argument, and the ways to write it.  ``parts`` then has what they are
        made of, with the place of each."""
        for key, schema in self._given.items():
            at = f"#/properties/{key.replace('~', '~0').replace('/', '~1')}"
            ways = [way for leaf in self._leaves(schema, at) for way in self._ways(leaf, at)]
            if not ways:
                raise self._wrong(at, "nothing that would be admitted")
            yield key, list(dict.fromkeys(ways))

    def _leaves(self, schema: Any, at: str) -> Iterator[Schema]:
        """What ``schema`` is a choice of, through references and ``anyOf``."""
        waiting, seen = [schema], 0
        while waiting:
            part, seen = waiting.pop(), seen + 1
            if seen > _MOST:
                raise self._wrong(at, "more ways to write it than can be followed")
            if isinstance(part, bool):
                waiting += [{}] if part else []
                continue
            said = [key for key in part if not _is_note(key)]
            if said == ["$ref"]:
                waiting.append(self._referred(part["$ref"], at))
            elif said == ["anyOf"] and isinstance(part["anyOf"], list):
                waiting += reversed(part["anyOf"])
            else:
                yield part

    def _check_references(self, schema: Schema) -> None:
        """Each argument is compiled alone, beside the definitions of the whole: a pointer to
        anything else would find another place there, or none."""
        waiting: list[tuple[str, Any]] = [("#", schema)]
        while waiting:
            at, part = waiting.pop()
            if isinstance(part, dict):
                reference = part.get("$ref", "#/$defs/")
                if not str(reference).startswith(tuple(f"#/{key}/" for key in DEFINITIONS)):
                    raise self._wrong(at, f"{reference!r:.60}, which is no definition of it")
                waiting += parts(at, part)

    def _referred(self, reference: Any, at: str) -> Any:
        kind, _, name = str(reference).removeprefix("#/").partition("/")
        name = name.replace("~1", "/").replace("~0", "~")
        named = self._shared.get(kind)
        if not isinstance(named, Mapping) or not isinstance(named.get(name), Mapping | bool):
            raise self._wrong(at, f"{reference!r:.60}, which is no definition of it")
        return named[name]

    def _ways(self, leaf: Schema, at: str) -> Iterator[Way]:
        types = leaf.get("type", [*TYPES])
        types = types if isinstance(types, list) else [types]
        if unknown := [kind for kind in types if not isinstance(kind, str) or kind not in TYPES]:
            raise self._wrong(at, f"the type {unknown[0]!r:.40}")
        opens = [key for key in _OPEN if key in leaf]
        if opens in (["enum"], ["const"]):
            values = leaf["enum"] if opens == ["enum"] else [leaf["const"]]
            yield from self._listed(leaf, values, types, at)
        elif opens:
            raise self._wrong(at, f"{opens[0]!r} in a form that leaves the type open")
        else:
            for kind in types:
                one = {**leaf, "type": kind}
                yield self._text(one, at) if kind == "string" else self._json(kind, one, at)

    def _listed(self, leaf: Schema, values: Any, types: Sequence[str], at: str) -> Iterator[Way]:
        beside = [key for key in leaf if not _is_note(key) and key not in ("enum", "const", "type")]
        if beside or not isinstance(values, list) or len(values) > _MOST:
            told = f" beside {beside[0]!r}" if beside else ", or too many"
            raise self._wrong(at, f"a list of values{told}")
        for value in values:
            kind = json_type(value)
            whole = kind == "number" and (isinstance(value, int) or value.is_integer())
            if kind not in types and not (whole and "integer" in types):
                continue
            if isinstance(value, str):
                yield Way(kind, quoted(value) if value else "")
            else:
                yield self._json(kind, {"enum": [value]}, at)

    def _json(self, kind: str, schema: Schema, at: str) -> Way:
        own = {key: value for key, value in schema.items() if key not in DEFINITIONS}
        made = {**self._shared, **own}
        self.parts.append((f"{self._field}: at {at}", Grammar.of_schema(made)))
        return Way(TYPES[kind], json_value(made))

    def _text(self, schema: Schema, at: str) -> Way:
        """Text as it is, so that its keywords are those of a regular expression."""
        if "format" in schema:
            raise self._wrong(at, f"a format of text, {schema['format']!r:.40}")
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        for size in (least, least if most is None else most):
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise self._wrong(at, f"the length {size!r:.40}")
        if most is not None and most < least:
            raise self._wrong(at, "a maxLength below its minLength")
        regexes = []
        if "pattern" in schema:
            if not isinstance(pattern := schema["pattern"], str):
                raise self._wrong(at, f"the pattern {pattern!r:.40}")
            regexes.append(_found_by(pattern))
        if least or most is not None:
            regexes.append(f"(?s:.{{{least},{'' if most is None else most}}})")
        self.parts += [(f"{self._field}: at {at}", Grammar.of_regex(one)) for one in regexes]
        if not regexes:
            return Way("string", ANY_TEXT)
        return Way("string", " & ".join(map(_between_slashes, regexes)), terminal=True)

    def _wrong(self, at: str, what: str) -> UsageError:
        return UsageError(
            f"{self._field}: the JSON schema has at {at} {what}, which cannot be enforced.",
            "Change it, or leave strict out: the model is told the schema all the same.",
        )


ANY_TEXT: Final = "TEXT?"  #: a rule's; ``TEXT`` is any text that is not empty


def quoted(text: str) -> str:
    """``text`` as a grammar has it."""
    return json.dumps(text, ensure_ascii=False)


def json_value(schema: Schema) -> str:
    """JSON that ``schema`` admits, as a grammar has it."""
    return f"%json {json.dumps({**schema, SETTINGS: {'whitespace_pattern': BLANKS}})}"


def _is_note(keyword: str) -> bool:
    return keyword in NOTES or keyword.startswith("x-")


def _found_by(pattern: str) -> str:
    """A regular expression for whole texts, in all of which ``pattern`` is found.  Digits and
    letters of words are those of ASCII, as in JavaScript."""
    pattern = re.sub(r"\\.", lambda found: _ASCII.get(found[0], found[0]), pattern, flags=re.DOTALL)
    inner, end = pattern.removeprefix("^"), re.search(r"(?<!\\)(?:\\\\)*\$\Z", pattern)
    begins = "" if inner != pattern else "(?s:.*)"
    return f"{begins}(?:{inner[:-1]})" if end else f"{begins}(?:{inner})(?s:.*)"


def _between_slashes(regex: str) -> str:
    def written(found: re.Match[str]) -> str:
        return {"/": r"\/", "\n": r"\n"}.get(found[0][-1:], found[0])

    return "/" + re.sub(r"\\.|/|\n", written, regex, flags=re.DOTALL) + "/"

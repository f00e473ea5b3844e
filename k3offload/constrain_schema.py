"""What of a JSON schema can be enforced, and where in it something cannot.

Knows the keywords of JSON Schema and which of them the library behind ``constrain.py`` enforces;
not the library itself.  A keyword that it would pass over is refused: an answer that breaks it
would look as if it had been checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from .errors import UsageError

DEFINITIONS: Final = ("$defs", "definitions")
#: Keywords that hold schemas: by name, one after another, a single one.
BY_NAME: Final = (*DEFINITIONS, "properties", "patternProperties")
IN_LIST: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE: Final = ("items", "additionalItems", "additionalProperties")
ENFORCED: Final = frozenset(BY_NAME + IN_LIST + SINGLE) | frozenset(
    (
        *("$ref", "$id", "$anchor", "$schema", "id", "type", "enum", "const", "required"),
        *("minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("pattern", "format"),
    )
)
#: What says nothing about a value.
NOTES: Final = frozenset(
    (
        *("title", "description", "default", "example", "examples", "$comment"),
        *("deprecated", "readOnly", "writeOnly", "discriminator"),
    )
)
SETTINGS: Final = "x-guidance"  #: the library's own, at the top
Schema = dict[str, Any]


def check_schema(schema: Schema) -> None:
    """Raise ``UsageError``, naming keyword and place, for what would be passed over."""
    settings = schema.get(SETTINGS, {})
    if not isinstance(settings, dict) or settings.get("lenient"):
        raise UsageError(
            f"The JSON schema has {SETTINGS} {settings!r:.60}, but nothing may be passed over.",
            "Give an object without lenient.",
        )
    waiting: list[tuple[str, Any]] = [("#", schema)]
    while waiting:
        at, part = waiting.pop()
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            raise UsageError(f"The JSON schema has {part!r:.40} at {at}.", "Give an object there.")
        for key, value in part.items():
            note = key in NOTES or key.startswith("x-")
            if (key == SETTINGS and at != "#") or not (note or key in ENFORCED):
                raise UsageError(
                    f"The JSON schema has {key!r} at {at}, which cannot be enforced.",
                    "Check its spelling, or leave it out.",
                )
            if key in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):
                raise UsageError(
                    f"The JSON schema has {key!r} as {str(value).lower()} at {at}, as draft 4 did.",
                    "Give it the number, in place of minimum or maximum.",
                )
        waiting += parts(at, part)


def narrowed(schema: Schema, message: str, fault: Callable[[Schema | bool], str]) -> str:
    """The innermost place of ``schema`` against which ``fault`` says ``message``.

    ``fault`` compiles a schema and returns what is wrong with it; a part is asked about with the
    definitions of the whole.
    """
    shared = {key: schema[key] for key in DEFINITIONS if key in schema}
    at, part = "#", schema
    while True:
        for place, inner in parts(at, part):
            alone = {**shared, **inner} if isinstance(inner, dict) else inner
            if fault(alone) == message:
                at, part = place, inner
                break
        else:
            return at
        if not isinstance(part, dict):
            return at


def parts(at: str, schema: Schema) -> Iterator[tuple[str, Any]]:
    """The schemas right inside ``schema``, which lies at the JSON pointer ``at``."""
    for key in BY_NAME:
        inside = schema.get(key)
        for name, part in inside.items() if isinstance(inside, dict) else ():
            yield f"{at}/{key}/{name.replace('~', '~0').replace('/', '~1')}", part
    for key in (*IN_LIST, *SINGLE):
        inside = schema.get(key)
        if isinstance(inside, list):  # of items too: draft 7's tuples
            yield from ((f"{at}/{key}/{i}", part) for i, part in enumerate(inside))
        elif inside is not None and key in SINGLE:
            yield f"{at}/{key}", inside

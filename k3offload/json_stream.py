"""JSON objects too large to hold, read pair by pair from a stream, hostile ones included.

This file knows JSON only.  Nesting is bounded, because a parser that tracks where it is needs
memory that grows with the square of the depth.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO, Final

import ijson

DEPTH: Final = 32  #: levels of nesting below a value; the files read here use 2

Events = Iterator[tuple[str, Any]]


def pairs(file: BinaryIO, under: str | None = None) -> Iterator[tuple[str, Any]]:
    """Keys and values of the object in ``file``, or of the object under its key ``under``.

    Values are built, so each must be small; values beside ``under`` are skipped unbuilt.  The
    caller checks the yielded keys for duplicates.  Raises ``ValueError`` on malformed JSON.
    """
    try:
        yield from _pairs(ijson.basic_parse(file), under)
    except ijson.JSONError as error:
        raise ValueError(str(error).split("\n")[0]) from None


def _pairs(events: Events, under: str | None) -> Iterator[tuple[str, Any]]:
    if next(events, None) != ("start_map", None):
        raise ValueError("it is not a JSON object")
    seen: set[str] = set()
    for event, key in events:
        if event == "end_map":
            break
        if under is None:
            yield key, _build(events, DEPTH)
            continue
        if key in seen:
            raise ValueError(f"the key {key!r} stands twice")
        seen.add(key)
        if key != under:
            _skip(events)
            continue
        if next(events, None) != ("start_map", None):
            raise ValueError(f"{under} is not an object")
        for inner, name in events:
            if inner == "end_map":
                break
            yield name, _build(events, DEPTH)
    for _ in events:  # reaches text behind the object, which is an error
        pass


def _build(events: Events, depth: int) -> Any:
    event, value = next(events)
    if event not in ("start_map", "start_array"):
        return value
    if depth == 0:
        raise ValueError("too deeply nested")
    if event == "start_map":
        built: dict[str, Any] = {}
        for inner, key in events:
            if inner == "end_map":
                break
            if key in built:
                raise ValueError(f"the key {key!r} stands twice")
            built[key] = _build(events, depth - 1)
        return built
    return list(_items(events, depth - 1))


def _items(events: Events, depth: int) -> Iterator[Any]:
    for event, value in events:
        if event == "end_array":
            return
        yield _build(_again(event, value, events), depth)


def _again(event: str, value: Any, events: Events) -> Events:
    yield event, value
    yield from events


def _skip(events: Events) -> None:
    depth = 0
    for event, _ in events:
        depth += event in ("start_map", "start_array")
        depth -= event in ("end_map", "end_array")
        if depth == 0:
            return

"""Documents that are lines of a JSONL file: plain rows, and requests of OpenAI's batch files.

This file knows the fields of such lines and which settings of a request can be honoured.  A field
that cannot is refused by name, since ignoring it would give another answer than was asked for.
Memory holds one line.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, Final

from .documents_chat import AS_IT_IS as CHAT_AS_IT_IS
from .documents_chat import URL as CHAT
from .documents_chat import Refuse, read_chat
from .documents_row import (
    Content,
    Fields,
    Row,
    checked_id,
    kind_of,
    make_row,
    missing,
    no_utf16,
    short,
)
from .documents_text import checked, too_large, utf8
from .errors import DocumentError, UsageError
from .sampling import Sampling

LINE: Final = ("custom_id", "method", "url", "body")
COMPLETIONS: Final = "/v1/completions"
#: What a document may set for itself; the rest of ``settings`` is ``model``, as it stands there.
SETTINGS: Final = ("max_tokens", "temperature", "top_p", "seed", "stop")
#: Fields that say in these words what is done anyway.
_AS_IT_IS: Final[Mapping[str, Any]] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "stream": False,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
}
_SKIP: Final = 1 << 20  #: bytes of a line that are passed over at a time


def json_rows(file: BinaryIO, name: str, fields: Fields, limit: int) -> Iterator[Row]:
    """Lines of ``file`` that are not blank, of ``limit`` bytes at most."""
    no_utf16(file, name)
    for number, line in json_lines(file, limit):
        place = f"{name}:{number}"
        if line is None:
            yield Row(number, error=too_large(place, limit, "a longer line"))
        elif line.strip():
            yield _json_row(line, number, place, fields, limit)


def json_lines(file: BinaryIO, limit: int) -> Iterator[tuple[int, bytes | None]]:
    """Lines and their numbers from 1; None for one of more than ``limit`` bytes."""
    number = 0
    while line := file.readline(limit + 1):
        number += 1
        long = len(line) > limit and not line.endswith(b"\n")
        yield number, None if long else line
        while long and (rest := file.readline(_SKIP)):
            long = not rest.endswith(b"\n")


def _json_row(line: bytes, number: int, place: str, fields: Fields, limit: int) -> Row:
    try:
        value = _object(line, place)
    except DocumentError as error:
        return Row(number, error=error)
    request = fields.text is None and is_request(value)

    def id_of() -> str | None:
        field = fields.id or ("custom_id" if request else "id")
        if field in value:
            return checked_id(value[field], field, place)
        if request or fields.id:
            raise missing("id", field, value, place)
        return None

    def content() -> Content:
        if request:
            asked = read_request(value, place)
            if asked.chat is None:
                checked(asked.text, f"{place}: the prompt", limit)
            return asked
        return Content(_plain(value, place, fields.text, limit))

    return make_row(number, id_of, content)


def _object(line: bytes, place: str) -> dict[str, Any]:
    text = utf8(line.removeprefix(codecs.BOM_UTF8).rstrip(b"\r\n"), place)
    try:
        value = json.loads(text, object_pairs_hook=_no_twins, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        what = f"{error.msg}, character {error.pos + 1}"
    except RecursionError:
        what = "it is nested too deeply"
    except ValueError as error:
        what = str(error).split(";")[0]  # Python adds how to allow longer numbers
    else:
        if isinstance(value, dict):
            return value
        what = f"it is {kind_of(value)}"
    raise DocumentError(f"{place} is no JSON object: {what}.", "Write one object in each line.")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {short(key)} stands twice")
        found[key] = value
    return found


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")


def _plain(value: dict[str, Any], place: str, chosen: str | None, limit: int) -> str:
    """The text of a line that is no request."""
    field = chosen or ("text" if "prompt" not in value and "text" in value else "prompt")
    if field not in value:
        if chosen is None and "messages" in value:
            raise DocumentError(
                f"{place} holds messages, and is no batch request.",
                f"Write it as one, with the url {CHAT} and the messages in its body.",
            )
        raise missing("text", field, value, place)
    if chosen is None and (wrong := [name for name in SETTINGS if name in value]):
        raise DocumentError(
            f"{place} has {wrong[0]} beside its {field}, where it would be ignored.",
            f"Write it as a batch request, or choose text_field (--text-field) {field}.",
        )
    if not isinstance(value[field], str):
        raise DocumentError(f"{place}: {field!r} is {kind_of(value[field])}.", "It must be a text.")
    return checked(value[field], f"{place}: {field!r}", limit)


def is_request(line: Mapping[str, Any]) -> bool:
    """Whether an object of a JSONL file is a batch request and no plain row."""
    return "body" in line and any(name in line for name in ("custom_id", "method", "url"))


def read_request(line: Mapping[str, Any], place: str) -> Content:
    """Prompt or chat, and settings, of the request ``line``; its ``custom_id`` is read by the
    caller.

    The settings are those of ``SETTINGS`` that it gives, ``stop`` as a tuple, and ``model``.
    Raises ``DocumentError``, which begins with ``place``, for what cannot be done as asked.
    """

    def refuse(problem: str, remedy: str) -> DocumentError:
        return DocumentError(f"{place} {problem}.", remedy)

    for name in ("method", "url"):
        if name not in line:
            raise refuse(f"has no field {name!r}", "Write it as a batch request.")
    if line["method"] != "POST":
        raise refuse(f"has the method {short(line['method'])}", "Only POST is known.")
    body, url = line["body"], line["url"]
    if url not in (COMPLETIONS, CHAT):
        raise refuse(f"asks for {short(url)}, which is not known", f"Use {COMPLETIONS} or {CHAT}.")
    if not isinstance(body, dict):
        raise refuse(f"has a body that is {kind_of(body)}", "Make it an object.")
    if extra := [name for name in line if name not in LINE]:
        raise refuse(f"has the field {short(extra[0])}, which is not known", "Leave it out.")
    if url == CHAT:
        chat, rest = read_chat(body, refuse)
        return Content("", _settings(rest, CHAT_AS_IT_IS, refuse), chat)
    text, rest = _prompt(body, refuse), {n: v for n, v in body.items() if n != "prompt"}
    return Content(text, _settings(rest, _AS_IT_IS, refuse))


def _prompt(body: dict[str, Any], refuse: Refuse) -> str:
    if "prompt" not in body:
        raise refuse("has no field 'prompt' in its body", "Give the text there.")
    prompt = body["prompt"]
    if not isinstance(prompt, str):
        remedy = "Give one text; several prompts go into lines of their own."
        raise refuse(f"has a prompt that is {kind_of(prompt)}", remedy)
    return prompt


def _settings(
    body: Mapping[str, Any], as_it_is: Mapping[str, Any], refuse: Refuse
) -> dict[str, Any]:
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        usual = as_it_is.get(name)
        if usual == value and isinstance(usual, bool) == isinstance(value, bool):
            continue
        if name not in (*SETTINGS, "model"):
            known = ", ".join(SETTINGS)
            what = f"asks for {short(name)}: {short(value)}, which cannot be done"
            raise refuse(what, f"Leave it out; known are {known}.")
    settings: dict[str, Any] = {name: given[name] for name in (*SETTINGS, "model") if name in given}
    if not isinstance(settings.get("model", ""), str):
        raise refuse(f"has a model that is {kind_of(settings['model'])}", "Give a name.")
    if isinstance(settings.get("stop"), str):
        settings["stop"] = (settings["stop"],)
    elif isinstance(settings.get("stop"), list):
        settings["stop"] = tuple(settings["stop"])
    tokens = settings.get("max_tokens", 1)
    if type(tokens) is not int or tokens < 1:
        raise refuse(f"has max_tokens {short(tokens)}", "Give a whole number from 1 up.")
    try:
        Sampling(**{n: settings[n] for n in SETTINGS[1:] if n in settings})
    except UsageError as error:
        what = error.problem.rstrip(".")[:100]
        raise refuse(f"cannot be sampled: {what}", error.remedy) from error
    return settings

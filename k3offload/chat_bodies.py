"""The wording of K3's system messages, read from the model's own ``encoding_k3.py``.

Tool declarations, thinking efforts, tool choices and response formats are told to the model in
sentences that it was trained on.  They are data of the model and come with it.  The file is parsed
and never run: what is taken are literals, at the places where the released file has them.  Where
it is absent, or written in another way, nothing is guessed, and whoever asks for what needs such a
sentence is told so.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from .errors import UsageError
from .paths import show_path

FILE: Final = "encoding_k3.py"
LIMIT: Final = 1_000_000  #: bytes of that file
HOLE: Final = "\0"  #: where the one value goes; no text of a released file has it

TOOLS: Final = "tool-declare"
MORE_TOOLS: Final = "tool-declare dynamic"
EFFORT: Final = "thinking-effort"
REQUIRED: Final = "tool-choice required"
NONE: Final = "tool-choice none"
JSON_OBJECT: Final = "response-format json_object"
JSON_SCHEMA: Final = "response-format json_schema"

#: How many values each body takes.
HOLES: Final[Mapping[str, int]] = {
    TOOLS: 1,
    MORE_TOOLS: 1,
    EFFORT: 1,
    REQUIRED: 0,
    NONE: 0,
    JSON_OBJECT: 0,
    JSON_SCHEMA: 1,
}


class Bodies:
    """The sentences of one model, by the names above."""

    def __init__(self, found: Mapping[str, str], why: str) -> None:
        """``why``: what to say of those that were not found."""
        self._found, self._why = dict(found), why

    @classmethod
    def read(cls, folder: Path | None) -> Bodies:
        """What the model in ``folder`` has; opens one file there, and runs nothing."""
        if folder is None or not os.path.lexists(path := folder / FILE):
            return cls({}, f"the model's folder has no {FILE}")
        try:
            with path.open("rb") as file:
                data = file.read(LIMIT + 1)
            if len(data) > LIMIT:
                raise ValueError(f"it is larger than {LIMIT:,} bytes")
            found = bodies_of(ast.parse(data))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return cls({}, f"{show_path(path)} cannot be read ({error})")
        return cls(found, f"{show_path(path)} does not have it where the released file does")

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def text(self, name: str, field: str, value: str = "") -> str:
        """The body ``name`` with ``value`` in its place, if it has one.

        Raises ``UsageError`` naming the ``field`` that was asked for, where there is no such body.
        """
        if name not in self._found:
            kind, _, which = name.partition(" ")
            raise UsageError(
                f"{field} cannot be told to the model: of the wording of its {kind} message"
                f"{f' ({which})' if which else ''} {self._why}.",
                f"Copy {FILE} into it from the repository the weights came from, or leave {field} "
                "out.",
            )
        return self._found[name].replace(HOLE, value)


def bodies_of(tree: ast.Module) -> dict[str, str]:
    """Every body that stands where the released file has it, and takes as many values."""
    found: dict[str, str] = {}
    for name, body in [*_told(tree), *_declared(tree)]:
        if name in found:  # two of one name: nobody knows which
            found[name] = HOLE * 9
        elif name in HOLES:
            found[name] = body
    return {name: body for name, body in found.items() if body.count(HOLE) == HOLES[name]}


def _told(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Calls ``f("TYPE", BODY)``, where ``if x == "WHICH"`` around them says which of its kind."""
    for which, node in _with_branch(tree, ""):
        if not (isinstance(node, ast.Call) and len(node.args) == 2 and not node.keywords):
            continue
        kind, body = _literal(node.args[0]), _literal(node.args[1])
        if kind is not None and body is not None:
            yield (kind if kind == EFFORT else f"{kind} {which}"), body.strip()


def _declared(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Assignments in the one function that writes ``tool-declare``; ``if dynamic`` is the other."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and any(
            isinstance(node, ast.Constant) and node.value == TOOLS for node in ast.walk(function)
        ):
            for which, node in _with_branch(function, ""):
                if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                    body = _literal(node.value)
                    if body is not None:
                        yield f"{TOOLS} {which}".strip(), body


def _with_branch(node: ast.AST, which: str) -> Iterator[tuple[str, ast.AST]]:
    """All below ``node``, each with the nearest name or text that an ``if`` tests for."""
    for child in ast.iter_child_nodes(node):
        yield which, child
        if isinstance(child, ast.If):
            # an ``elif`` is an ``if`` among the parts of the other branch, and is asked again
            yield from _with_branch(ast.Module(child.body, []), _tested(child.test) or which)
            yield from _with_branch(ast.Module(child.orelse, []), which)
        else:
            yield from _with_branch(child, which)


def _tested(test: ast.expr) -> str:
    if isinstance(test, ast.Name):
        return test.id
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq):
        return _literal(test.comparators[0]) or ""
    return ""


def _literal(node: ast.expr) -> str | None:
    """The text that ``node`` is, with ``HOLE`` for each value in it; None for anything else."""
    if isinstance(node, ast.Constant):
        known = isinstance(node.value, str) and HOLE not in node.value
        return str(node.value) if known else None
    if isinstance(node, ast.JoinedStr):
        parts = [HOLE if _plain(part) else _literal(part) for part in node.values]
        return None if None in parts else "".join(map(str, parts))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _literal(node.left), _literal(node.right)
        return None if left is None or right is None else left + right
    return None


def _plain(part: ast.expr) -> bool:
    """Whether ``part`` is ``{value}`` as it is, without ``!r`` or a format."""
    return isinstance(part, ast.FormattedValue) and part.conversion == -1 and not part.format_spec

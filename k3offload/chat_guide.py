"""Which tokens may come in an answer whose content or calls are held to something, in K3's format.

Reasoning is free, but the answer cannot end in it.  Where it ends, by closing ``think`` or by
opening anything, the tags up to the content are forced; from there a grammar holds: of the content
alone, or of all that is left.  Content ends where nothing may follow by the grammar, or where the
model closes it once it is complete.

This file knows what requests ask for, and refuses what no grammar can hold, before any work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from .chat_calls import Calls, calls_grammar, tools_of
from .chat_format import Marks
from .chat_messages import named_tool
from .constrain import Constraint, ConstraintState, Grammar, constraint
from .errors import UsageError
from .sampling import Row
from .tokenizer import Tokenizer

_ANY_JSON: Final = {"type": "object"}


def guide(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Any,
    tool_choice: Any,
    response_format: Any,
    thinking: bool,
    parallel: bool = True,
) -> Callable[[], AnswerGuide] | None:
    """What makes guides of answers to a request that the encoder has taken; None if all is free.

    ``parallel``: whether an answer may have several calls.  Raises ``UsageError`` that begins with
    the field, for what cannot be enforced.
    """
    declared = tools_of(messages, tools)
    if response_format is not None and response_format["type"] != "text":
        if declared:
            raise UsageError(
                "response_format is given beside tools, and calls are no such content.",
                "Leave one of them out.",
            )
        compiled = _of_content(tokenizer, response_format)
        return partial(AnswerGuide, tokenizer, compiled, thinking, content=True)
    name = named_tool(tool_choice)
    must = tool_choice == "required" or name is not None
    never = tool_choice == "none"
    if not declared or not (must or never or not parallel or any(t.strict for t in declared)):
        return None
    calls = calls_grammar(
        Marks.of(tokenizer),
        [tool for tool in declared if name in (None, tool.name)],
        content=not must,
        least=int(must),
        most=0 if never else 1 if name is not None or not parallel else None,
    )
    compiled = _of_calls(tokenizer, calls, "tools" if name is None else "tool_choice")
    return partial(AnswerGuide, tokenizer, compiled, thinking, content=False)


def _of_content(tokenizer: Tokenizer, given: Mapping[str, Any]) -> Constraint:
    schema = given["json_schema"]["schema"] if given["type"] == "json_schema" else _ANY_JSON
    try:
        return constraint(tokenizer, Grammar.of_schema(schema))
    except UsageError as error:
        raise UsageError(f"response_format: {error.problem}", error.remedy) from None


def _of_calls(tokenizer: Tokenizer, calls: Calls, field: str) -> Constraint:
    try:
        return constraint(tokenizer, calls.grammar)
    except UsageError as error:
        of_the_text = error.problem.startswith("The lark grammar")  # and of nothing around it
        for place, part in calls.parts if of_the_text else ():  # which of them it is
            try:
                constraint(tokenizer, part)
            except UsageError as inner:
                raise UsageError(f"{place}: {inner.problem}", inner.remedy) from None
        raise UsageError(f"{field}: {error.problem}", error.remedy) from None


class AnswerGuide:
    """Of one answer; a ``generate.Guide``."""

    def __init__(
        self, tokenizer: Tokenizer, constraint: Constraint, thinking: bool, *, content: bool
    ) -> None:
        """``thinking``: as the prompt was encoded; ``content``: whether ``constraint`` is of the
        content alone, and not of all that comes from there on."""
        self._marks, self._content = Marks.of(tokenizer), content
        self._think = tokenizer.encode("think", specials=False)
        self._response = tokenizer.encode("response", specials=False)
        self._ends = [*tokenizer.end_ids, self._marks.end, self._marks.sep]
        self._constraint = constraint
        self._forced: deque[int] = deque()
        self._state: ConstraintState | None = None if thinking else constraint.start()
        self._closed = False

    def mask(self, logits: Row) -> Row:
        """``logits`` [vocab] with -inf where a token may not come, in memory of its own."""
        if self._state is None and not self._forced:
            free: Row = logits.copy()
            free[self._ends] = -np.inf
            return free
        masked: Row = np.full_like(logits, -np.inf)
        if self._forced:
            masked[self._forced[0]] = 0.0  # it alone, whatever its own logit is
            return masked
        assert self._state is not None
        allowed = self._state.allowed()
        if self._content and self._state.complete:
            allowed[self._marks.close] = True
        np.copyto(masked, logits, where=allowed)
        return masked

    def accept(self, token: int) -> None:
        """Go on by ``token``."""
        marks = self._marks
        if self._forced:
            self._forced.popleft()
            if not self._forced:
                self._state = self._constraint.start()
        elif self._state is None:
            opening = [*self._response, marks.sep]
            if token == marks.close:
                self._forced.extend([*self._think, marks.sep, marks.open, *opening])
            elif token == marks.open:
                self._forced.extend(opening)
        elif self._content and token == marks.close:
            self._closed = True
        else:
            self._state.accept(token)

    @property
    def finished(self) -> bool:
        """Whether nothing may follow any more."""
        return self._closed or (self._state is not None and self._state.finished)

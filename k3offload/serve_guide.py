"""Which tokens may come in an answer whose content must follow a grammar, in K3's chat format.

Reasoning is free, but the answer cannot end in it.  Where it ends, by closing ``think`` or by
opening anything, the tags up to the content are forced; from there the grammar holds.  The answer
ends where nothing may follow by the grammar, or where the model closes the content once it is
complete.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from .chat_format import Marks
from .constrain import Constraint, ConstraintState
from .sampling import Row
from .tokenizer import Tokenizer


class ContentGuide:
    """Of one answer; a ``generate.Guide``."""

    def __init__(self, tokenizer: Tokenizer, constraint: Constraint, thinking: bool) -> None:
        """``thinking``: as the prompt was encoded."""
        self._marks = Marks.of(tokenizer)
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
        if self._state.complete:
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
        elif token == marks.close:
            self._closed = True
        else:
            self._state.accept(token)

    @property
    def finished(self) -> bool:
        """Whether nothing may follow any more."""
        return self._closed or (self._state is not None and self._state.finished)

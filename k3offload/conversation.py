"""A conversation that goes on: its messages, the session that has computed them, a folder for both.

The messages are what counts.  The session is a memory of what is computed already: a turn goes on
from there as far as its tokens agree, and from a snapshot taken before the last turn where they do
not, after an interrupted answer, say, or one that is taken back.  An answer becomes part of the
conversation when it is complete, or has reached its most tokens, and all of it was taken; one that
failed or was interrupted leaves nothing but the user's message.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .chat import Encoder
from .chat_messages import read_messages
from .chat_parse import Answer, Event, Parser
from .durable import LockFile, sync, write_file
from .engine import Engine
from .errors import DoesNotFit, ScratchError, SessionError, UsageError
from .generate import Done, Prefill, Token
from .paths import show_path
from .sampling import Sampling
from .session import Session, Snapshot
from .session_manifest import refuse_in_model

FILE: Final = "chat.json"  #: the messages, in the folder of a conversation
STATE: Final = "session"  #: the folder of its session, below that
LOCK: Final = "chat.lock"  #: beside FILE, while a process keeps its conversation there
STATES: Final = 2  #: that a conversation keeps: its session, and the snapshot
FORMAT: Final = 1


@dataclass(frozen=True)
class Manner:
    """How answers are made."""

    sampling: Sampling
    max_new_tokens: int = 1024
    thinking: bool = True
    effort: str | None = None


class Conversation:
    """``ask`` a question and iterate over the answer; ``messages`` is what has been said."""

    def __init__(self, engine: Engine, encoder: Encoder, manner: Manner) -> None:
        self.engine, self.manner = engine, manner
        self.messages: list[dict[str, Any]] = []
        self._encoder = encoder
        self._session = engine.session()
        self._before: Snapshot | None = None  # of the turn that is the last one
        self._turn = 0
        self._places: set[str] = set()  # folders that hold this conversation, perhaps less of it

    @property
    def session(self) -> Session:
        """What is computed."""
        return self._session

    def ask(self, text: str) -> Iterator[Event | Prefill]:
        """Add a message and give its answer, ``Finish`` last.  Whoever stops before the iteration
        has ended drops the answer.

        Raises ``UsageError`` for a message that cannot be, or is too long, and leaves it out;
        another ``K3Error`` if the answer fails.
        """
        manner = self.manner
        user = {"role": "user", "content": text}
        ids = self._encode([*self.messages, user])
        limit = min(self.engine.options.context, self.engine.spec.context)
        self.engine.check_context(len(ids) + 1)
        self.messages.append(user)
        self._follow(ids)
        # a stop string ends the content alone, and markers are no text: the parser looks for it
        parser = Parser(self.engine.tokenizer, manner.thinking, manner.sampling.stop)
        sampling = dataclasses.replace(manner.sampling, stop=(), seed=self._seed())
        answer, reason = Answer(), "stop"
        yield Prefill(0, 0, len(self._session.waiting()))
        most = min(manner.max_new_tokens, limit - len(ids))
        for event in self._session.generate(most, sampling):
            if isinstance(event, Prefill):
                yield event
            elif isinstance(event, Token):
                made = parser.feed([event.token])
                answer.add(made)
                yield from made
                if parser.done:
                    break
            elif isinstance(event, Done):
                if event.error is not None:
                    raise event.error
                reason = event.finish_reason
        made = parser.end(reason)
        answer.add(made)
        yield from made  # until the last of it was taken, an interrupt drops it
        self.messages.append(answer.message())

    def _seed(self) -> int | None:
        """Another one for each turn, all of them known from the first."""
        seed, self._turn = self.manner.sampling.seed, self._turn + 1
        return None if seed is None else seed + self._turn - 1

    def _encode(self, messages: list[dict[str, Any]]) -> list[int]:
        manner = self.manner
        return self._encoder.encode(messages, thinking=manner.thinking, effort=manner.effort)

    def _follow(self, ids: list[int]) -> None:
        """Make ``ids`` the session's timeline; what agrees with it stays computed."""
        session, before = self._session, self._before
        same = _same(ids, session.tokens)
        if same == session.length and session.state.broken is None:
            before = None
        elif before is not None and _same(ids, before.tokens) == len(before.tokens):
            session.rewind(before)
        else:
            before = None
            session.truncate(same)
        self._before = before  # the room of an older one is needed for the next
        if before is None and session.position:
            try:
                self._before = session.snapshot()
            except (DoesNotFit, ScratchError) as error:
                self.engine.warn(f"an interrupted answer will cost more: {error.problem}")
        session.append(ids[session.length :])

    # ---- what a person may change ----

    def undo(self) -> str | None:
        """Take the last message of the user back, and what followed; returns its text."""
        for place in reversed(range(len(self.messages))):
            if self.messages[place]["role"] == "user":
                text = self.messages[place]["content"]
                del self.messages[place:]
                return str(text)
        return None

    @property
    def system(self) -> str:
        """What the model is told at the beginning."""
        first = self.messages[:1]
        return str(first[0]["content"]) if first and first[0]["role"] == "system" else ""

    @system.setter
    def system(self, text: str) -> None:
        """Raises ``UsageError`` for what is no UTF-8."""
        told = [{"role": "system", "content": text}] if text else []
        if told:
            self._encode(told)
        self.messages = [*told, *(self.messages[1:] if self.system else self.messages)]

    # ---- on disk ----

    def save(self, folder: Path) -> None:
        """Write the conversation and what is computed of it to ``folder``.

        The messages come first: whatever happens to the rest, they are there.  What another
        conversation has left in ``folder`` is not replaced.  Raises ``SessionError``,
        ``UsageError`` or ``OSError``.
        """
        refuse_in_model(folder, self.engine.checkpoint.folder)
        check_folder(folder)
        if os.path.lexists(folder / FILE) and os.path.realpath(folder) not in self._places:
            read_folder(folder)
            raise UsageError(
                f"{show_path(folder)} holds another conversation.", "Name a new folder, or load it."
            )
        folder.mkdir(exist_ok=True)
        content = {"format": FORMAT, "messages": self.messages}
        text = json.dumps(content, ensure_ascii=False, indent=1)
        write_file(folder / FILE, [text.encode("utf-8", "surrogatepass"), b"\n"])
        self._places.add(os.path.realpath(folder))
        sync(folder)
        if self._agrees():
            self._session.save(folder / STATE)

    def _agrees(self) -> bool:
        """Whether the session has computed a beginning of what has been said, if need be after
        going back to where its last turn began."""
        try:
            ids = self._encode(self.messages) if self.messages else []
        except UsageError:  # of messages that cannot be asked: they are kept all the same
            return False
        for before in (None, self._before):
            if before is not None:
                self._session.rewind(before)
            tokens, state = self._session.tokens, self._session.state
            if state.broken is None and state.position and _same(ids, tokens) == len(tokens):
                return True
        return False

    def load(self, folder: Path) -> None:
        """Go on with the conversation in ``folder``.  A saved session that cannot be used is told
        in a warning: the messages are computed anew.  Raises ``SessionError`` for damage of the
        messages, and then nothing has changed."""
        messages, session = read_folder(folder), None
        self._before = None  # its room may be needed
        if (folder / STATE).is_dir():
            try:
                session = self.engine.load_session(folder / STATE)
            except (SessionError, UsageError, DoesNotFit, ScratchError) as error:
                self.engine.warn(f"the conversation will be computed anew: {error}")
        if session is None:
            self._session.reset()
        else:
            self._session.close()
            self._session = session
        self.messages, self._places = messages, {os.path.realpath(folder)}

    def close(self) -> None:
        """Give the memory of its states back."""
        self._before = None
        self._session.close()


def _same(ids: list[int], tokens: tuple[int, ...]) -> int:
    """How many tokens both begin with."""
    for place, (one, other) in enumerate(zip(ids, tokens, strict=False)):
        if one != other:
            return place
    return min(len(ids), len(tokens))


def check_folder(folder: Path) -> None:
    """Raise ``UsageError`` unless a conversation can be kept in ``folder``: one that is there, or a
    new or empty one."""
    shown = show_path(folder)
    if folder.is_dir():
        names = {entry.name for entry in folder.iterdir()}
        if names - {LOCK} and FILE not in names:
            raise UsageError(f"{shown} holds no conversation.", "Name a new folder.")
    elif not folder.parent.is_dir():
        raise UsageError(f"{shown}: its parent is no folder.", "Make it first.")
    elif folder.exists() or folder.is_symlink():
        raise UsageError(f"{shown} is no folder.", "Name a new one.")


class Hold:
    """The folder that a process keeps its conversation in, and no other process meanwhile."""

    def __init__(self) -> None:
        self._lock: LockFile | None = None
        self._real = ""

    def move(self, folder: Path) -> None:
        """Hold ``folder`` instead.  Raises ``UsageError`` if another process does, ``OSError`` if
        nothing can be written there; what was held before is then held still."""
        real = os.path.realpath(folder)
        if real == self._real:
            return
        lock = LockFile(folder / LOCK)
        if lock.who:
            raise UsageError(
                f"The conversation in {show_path(folder)} is under way elsewhere: {lock.who}.",
                "End that one, or name another folder.",
            )
        self.close()
        self._lock, self._real = lock, real

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()
        self._lock, self._real = None, ""


def read_folder(folder: Path) -> list[dict[str, Any]]:
    """The messages in ``folder``.  Raises ``SessionError`` if they are damaged or not there."""
    file = folder / FILE
    try:
        content = json.loads(file.read_bytes())
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        messages = content["messages"]
        if messages != []:
            read_messages(messages)
    except FileNotFoundError:
        raise SessionError(
            f"{show_path(folder)} holds no conversation.", "Name the folder of a /save."
        ) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, UsageError) as error:
        raise SessionError(
            f"{show_path(file)} is damaged: {error}.", "Mend it, or name another folder."
        ) from error
    found: list[dict[str, Any]] = messages
    return found

"""What is said to the engine's thread and not done yet: requests that wait, calls, to end.

Any thread may speak; the engine's takes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from .serve_job import Job, ServerStopped

T = TypeVar("T")


class Inbox:
    """Empty and open, until it is closed with what to say from then on."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[Job] = deque()
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._closed: ServerStopped | None = None

    # ---- for any thread ----

    @property
    def open(self) -> bool:
        return self._closed is None

    @property
    def why(self) -> ServerStopped:
        """What it was closed with."""
        assert self._closed is not None
        return self._closed

    def put(self, job: Job, check: Callable[[int], None]) -> None:
        """Let ``job`` wait, unless ``check`` raises when told how many do already.  Raises
        ``ServerStopped``."""
        with self._changed:
            self._check()
            check(len(self._queue))
            self._queue.append(job)
            self._changed.notify()

    def check(self, check: Callable[[int], None]) -> None:
        """Raise what ``put`` would."""
        with self._changed:
            self._check()
            check(len(self._queue))

    def _check(self) -> None:
        if self._closed is not None:
            raise self._closed

    def cancel(self, job: Job) -> None:
        """Nobody wants ``job`` any more, wherever it is."""
        with self._changed:
            job.cancelled = True
            with suppress(ValueError):
                self._queue.remove(job)
            self._changed.notify()

    def call(self, what: Callable[[], T]) -> Future[T]:
        """Let the engine's thread call ``what``."""
        future: Future[T] = Future()
        with self._changed:
            if self._closed is None:
                self._calls.append((future, what))
                self._changed.notify()
            else:
                future.set_exception(self._closed)
        return future

    def jobs(self) -> list[Job]:
        """Those that wait, in order."""
        with self._changed:
            return list(self._queue)

    def close(self, why: ServerStopped) -> None:
        """Take nothing more; the first reason stays."""
        with self._changed:
            self._closed = self._closed or why
            self._changed.notify()

    # ---- for the engine's thread ----

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._queue or self._calls) and self._closed is None

    def wait(self) -> None:
        """Until there is something to do."""
        with self._changed:
            while self.empty:
                self._changed.wait()

    def begin(self, free: int, running: list[Job]) -> Job | None:
        """The job whose turn it is moves to ``running``, if its answers have ``free`` places."""
        with self._changed:
            if not self._queue or self._queue[0].places > free:
                return None
            running.append(self._queue.popleft())
            return running[-1]

    def put_back(self, job: Job) -> None:
        """It cannot begin yet, and stays the first."""
        with self._changed:
            if not job.cancelled:
                self._queue.appendleft(job)

    def serve(self) -> None:
        """Do the calls."""
        while True:
            with self._changed:
                if not self._calls:
                    return
                future, what = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(what())
            except Exception as error:
                future.set_exception(error)

    def give_up(self) -> list[Job]:
        """After ``close``: end the calls; the jobs that will never begin."""
        with self._changed:
            jobs, calls = list(self._queue), list(self._calls)
            self._queue.clear()
            self._calls.clear()
        for future, _ in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(self._closed)
        return jobs

"""What whoever starts a server may set, beside how the model is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import UsageError


@dataclass(frozen=True)
class Settings:
    """Sizes in bytes, times in seconds of the wall clock.

    model: the name that requests call the model by.
    key: what every request must bring; None lets everybody in.
    origins: of pages that browsers may let talk to the server.
    hosts: names that requests may call the server by, so that no page can give it a name of its
    own; any, if there are none.
    max_new_tokens: of an answer, where a request says nothing.
    queue: requests that wait for a place, at most.
    body, body_seconds: size of a request, and the time it may take to arrive.
    ping: between two signs of life in a stream.
    blanks: whether an answer that is not streamed shows them too, as blanks before its JSON.
    stalled: a client may take nothing for so long.
    time_limit: of a whole request; None: as long as it takes.
    health: within which the engine must answer to count as alive; it does between two layers.
    """

    model: str
    key: str | None = None
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    max_new_tokens: int = 2048
    queue: int = 64
    body: int = 16 * 2**20
    body_seconds: float = 30.0
    ping: float = 4.0
    blanks: bool = False
    stalled: float = 120.0
    time_limit: float | None = None
    health: float = 60.0

    def __post_init__(self) -> None:
        """Raises ``UsageError`` naming what is out of range."""
        for name in ("max_new_tokens", "body", "body_seconds", "ping", "stalled", "health"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} is {getattr(self, name)}.", "It must be more than 0.")
        if self.queue < 0:
            raise UsageError(f"queue is {self.queue}.", "Give 0 or more.")
        if self.time_limit is not None and not self.time_limit > 0:
            raise UsageError(f"time_limit is {self.time_limit}.", "It must be more than 0.")
        if self.key is not None and not (
            self.key and self.key.isascii() and self.key.isprintable()
        ):
            raise UsageError(
                "The key is empty, or has letters that no header can hold.", "Use plain letters."
            )
        if not self.model:
            raise UsageError("The model has no name.", "Give one, or leave it out.")

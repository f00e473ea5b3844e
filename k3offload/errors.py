"""Errors a person can act on.

Every error of ours says what is wrong (naming the file, field, tensor, layer or number) and ends
with what to do.  Asserts are for our own bugs; these are for everything else.
"""

from __future__ import annotations


class K3Error(Exception):
    """Base of every error this package raises on purpose.

    ``problem`` names what is wrong, ``remedy`` says what to do about it.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{problem} {remedy}".strip())


class UsageError(K3Error):
    """A wrong flag, argument or value from the caller."""


class TooLong(UsageError):
    """A prompt and its answer are longer than the context."""


class ConfigError(K3Error):
    """``config.json`` is missing, contradictory, or asks for a computation we do not know."""


class CheckpointError(K3Error):
    """A model file is missing, damaged, truncated, or does not hold what it should."""


class TokenizerError(K3Error):
    """The tokenizer file is missing or damaged, or a token id is out of range."""


class DoesNotFit(K3Error):
    """The memory sum is larger than what is allowed.  ``missing`` is in bytes."""

    def __init__(self, problem: str, remedy: str = "", missing: int = 0) -> None:
        super().__init__(problem, remedy)
        self.missing = missing


class ReadError(K3Error):
    """A read of model bytes failed for good; names the file and the offset."""


class ScratchError(K3Error):
    """What a sequence moved to scratch files cannot be written or read back; names the file."""


class SlotsExhausted(K3Error):
    """Every slot is leased by the very caller that asks for one more."""


class NumericError(K3Error):
    """NaN or infinity where a number must be; names the layer or the step."""


class SessionError(K3Error):
    """A session is used in a way its state does not allow."""


class BatchError(K3Error):
    """What a batch writes cannot be written, read or continued; names the file and the line."""


class DocumentError(K3Error):
    """One document of a batch cannot be read; names it.  The others go on."""

"""Which tokens may come next, so that an answer follows a JSON schema, a regex or a grammar.

Knows the library ``llguidance`` (extra ``constrain``) and the bytes of a vocabulary; not the model,
not sampling.  The library reads the grammar and walks it; this file gives it our tokens, turns what
it says into errors that name a place, and refuses what it would pass over in silence.

A constraint begins anew with every answer.  What a grammar allows depends on it and on the tokens
of the answer alone, so nothing here changes with companions, order or memory.
"""

from __future__ import annotations

import json
import re
import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal
from weakref import WeakKeyDictionary, WeakMethod

import numpy as np
from numpy.typing import NDArray

from .constrain_schema import check_schema, narrowed
from .errors import UsageError
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

KEPT: Final = 64  #: compiled constraints kept for a tokenizer, the last used
LONGEST: Final = 255  #: bytes of a token; the library has no room for longer ones
#: Where a schema says nothing of blanks: each gap takes some, but no answer gets lost in them.
BLANKS: Final = r"[\x20\x0A\x0D\x09]{1,40}"
_SHOWN: Final = 300  #: characters of a message of the library
_LARK_OPTION = re.compile(r"^\s*[?!]?[\w.-]+\[[^\]\n]*\b(temperature|stop)\s*=", re.M)


@dataclass(frozen=True)
class Grammar:
    """What an answer must look like, as a plain setting; make one with ``of_...``.

    Not checked before a model's tokenizer compiles it.
    """

    kind: Literal["json", "regex", "lark"]
    text: str

    def __post_init__(self) -> None:
        if self.kind not in ("json", "regex", "lark") or not isinstance(self.text, str):
            raise UsageError(f"This is no grammar: {self!r:.80}.", "Make it with Grammar.of_...")

    @classmethod
    def of_schema(cls, schema: dict[str, Any] | str) -> Grammar:
        """JSON that a schema (draft 2020-12, or its text) admits.

        Properties come in the order of the schema.  A top-level ``x-guidance`` has settings of the
        library, above all of blanks.  Raises ``UsageError`` for what is no JSON object.
        """
        try:
            if isinstance(schema, str):
                schema = json.loads(schema)
            text = json.dumps(schema, allow_nan=False)
        except (ValueError, TypeError, RecursionError) as error:
            why = "it is nested too deeply" if isinstance(error, RecursionError) else error
            raise UsageError(f"The JSON schema is no JSON: {why}.", "Correct it.") from None
        if not isinstance(schema, dict):
            raise UsageError(f"The JSON schema is {text[:40]}, no object.", "Give an object.")
        return cls("json", text)

    @classmethod
    def of_regex(cls, regex: str) -> Grammar:
        """Text that ``regex`` matches from its first to its last character; no look-around."""
        return cls("regex", regex)

    @classmethod
    def of_lark(cls, grammar: str) -> Grammar:
        """Text that a context-free grammar admits, in the library's kind of Lark.

        Special tokens are written as they are spelled where that is ``<...>``, or ``<[ID]>``.
        """
        return cls("lark", grammar)


class ConstraintState:
    """Where one answer stands in its grammar.  Made by ``Constraint.start``."""

    def __init__(self, matcher: LLMatcher, vocab: int) -> None:
        self._matcher, self._vocab = matcher, vocab

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may come next, [vocab]; end tokens only where the grammar may end.

        Raises ``UsageError`` where the grammar has become too complex to follow, or admits
        nothing that this vocabulary could say.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        allowed = np.unpackbits(bits, count=self._vocab, bitorder="little").view(np.bool_)
        if not allowed.any():
            raise UsageError(
                "The grammar admits no token here and no end either.", "Correct the grammar."
            )
        return allowed

    def mask(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """``logits`` [vocab] with -inf where a token may not come, in memory of its own.

        Raises ``UsageError`` as ``allowed`` does.
        """
        masked = np.full_like(logits, -np.inf)
        np.copyto(masked, logits, where=self.allowed())
        return masked

    def accept(self, token: int) -> None:
        """Go on by ``token``; raises ``UsageError`` for one that may not come here."""
        if not self._matcher.consume_token(token):
            self._check()
            raise UsageError(
                f"The grammar admits no token {token} here.", "Give it only tokens that it allows."
            )

    @property
    def complete(self) -> bool:
        """Whether the answer may end here."""
        return self._matcher.is_accepting()

    @property
    def finished(self) -> bool:
        """Whether nothing may follow any more, or an end token has come."""
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise UsageError(
                f"The answer cannot go on by its grammar: {_message(self._matcher)}.",
                "Make the grammar simpler, or give it only tokens that it allows.",
            )


class Constraint:
    """A grammar compiled for one tokenizer, for any number of answers.  See ``constraint``."""

    def __init__(self, matcher: LLMatcher, vocab: int) -> None:
        self._matcher, self._vocab = matcher, vocab

    def start(self) -> ConstraintState:
        """The state of an answer that has no token yet."""
        return ConstraintState(self._matcher.deep_copy(), self._vocab)


def constraint(tokenizer: Tokenizer, grammar: Grammar) -> Constraint:
    """``grammar`` compiled for ``tokenizer``; the last 64 of them are kept.

    The first one for a tokenizer takes its vocabulary along: with 163,840 ids 0.9 s and 140 MB,
    which a plan counts only if this is called before loading; each further one about 1 ms.  A mask
    of that many takes 0.3 ms, where a string begins up to 5 ms, on a core of a Xeon.  Text that a
    grammar forces is cut into tokens as the tokenizer would.

    Raises ``UsageError`` if the extra is missing, or for a grammar that cannot be compiled; of a
    schema it names the place, and the keyword that cannot be enforced.
    """
    with _LOCK:
        if tokenizer not in _VOCABULARIES:
            _VOCABULARIES[tokenizer] = _Vocabulary(tokenizer)
        vocabulary = _VOCABULARIES[tokenizer]
    return vocabulary.constraint(grammar)


class _Vocabulary:
    """The tokens of one tokenizer as the library takes them, and what was compiled for them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        try:
            import llguidance
        except ImportError:
            raise UsageError(
                "Constrained answers need the package llguidance.",
                "Install the extra: pip install 'k3offload[constrain]'.",
            ) from None
        if not tokenizer.end_ids:
            raise UsageError(
                "This model names no end token, so no constrained answer could end.",
                "Name one in its generation_config.json.",
            )
        self._library, self._vocab = llguidance, tokenizer.vocab
        ends = sorted(tokenizer.end_ids)
        wrapped = llguidance.TokenizerWrapper(_Tokens(tokenizer, ends[0]))
        self._tokens = llguidance.LLTokenizer(wrapped, eos_token=ends)
        self.constraint = lru_cache(maxsize=KEPT)(self._compile)

    def _compile(self, grammar: Grammar) -> Constraint:
        if grammar.kind == "json":
            return Constraint(self._of_schema(json.loads(grammar.text)), self._vocab)
        make = self._library.LLMatcher
        if grammar.kind == "lark":
            option = _LARK_OPTION.search(grammar.text)
            if option:
                raise UsageError(
                    f"The Lark grammar sets {option[1]}, which has no effect here.",
                    "Leave it out; instead of stop= use suffix= or lazy.",
                )
            matcher = self._matcher(make.grammar_from_lark(grammar.text))
        else:
            matcher = self._matcher(make.grammar_from_regex(grammar.text))
        if matcher.is_error():
            raise UsageError(
                f"The {grammar.kind} grammar cannot be used: {_message(matcher)}.", "Correct it."
            )
        return Constraint(matcher, self._vocab)

    def _of_schema(self, schema: dict[str, Any]) -> LLMatcher:
        check_schema(schema)

        def fault(part: dict[str, Any] | bool) -> str:
            """What the library says against a part of the schema; empty if nothing."""
            return _message(self._matcher(self._of_json(part)))

        try:
            matcher = self._matcher(self._of_json(schema))
        except ValueError as error:  # of the library's own reader
            deep = "recursion limit" in str(error)
            why = "it is nested too deeply" if deep else error
            raise UsageError(f"The JSON schema cannot be used: {why}.", "Correct it.") from None
        if matcher.is_error():
            message = _message(matcher)
            raise UsageError(
                f"The JSON schema cannot be used at {narrowed(schema, message, fault)}: {message}.",
                "Correct it there, or leave out what cannot be enforced.",
            )
        return matcher

    def _of_json(self, schema: dict[str, Any] | bool) -> str:
        told = schema.get("x-guidance", {}) if isinstance(schema, dict) else {}
        own = any("whitespace" in key for key in told)
        blanks: Any = {} if own else {"whitespace_pattern": BLANKS}
        whole = schema if isinstance(schema, dict) else {"allOf": [schema]}
        made: str = self._library.LLMatcher.grammar_from_json_schema(
            json.dumps(whole), defaults=blanks, overrides={"lenient": False}
        )
        return made

    def _matcher(self, grammar: str) -> LLMatcher:
        return self._library.LLMatcher(self._tokens, grammar, log_level=0)


_VOCABULARIES: WeakKeyDictionary[Tokenizer, _Vocabulary] = WeakKeyDictionary()
_LOCK = threading.Lock()


class _Tokens:
    """A tokenizer in the library's words.  Special tokens stay outside of any text."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, end: int) -> None:
        ids = range(tokenizer.vocab)
        named = tokenizer.end_ids.union(tokenizer.specials.values())
        self.eos_token_id = end
        self.special_token_ids = [i for i in ids if i in named or tokenizer.is_special(i)]
        # An empty one never comes.
        words = map(tokenizer.token_bytes, ids)
        self.tokens = [word if len(word) <= LONGEST else b"" for word in words]
        # The library keeps this object where no garbage collector looks: it must not keep a model.
        self._encode = WeakMethod(tokenizer.encode)

    def __call__(self, text: bytes) -> list[int]:
        encode = self._encode()
        assert encode is not None
        return encode(text.decode())


def _message(matcher: LLMatcher) -> str:
    """What the library says, in one line, without its innards."""
    lines = matcher.get_error().partition("\n<state>")[0].splitlines()
    causes = [line.strip() for line in lines[1:] if line.startswith("error:")]
    return " ".join([*lines[:1], *causes])[:_SHOWN].rstrip(".")

"""Records the routing of a model that decodes texts token by token, for replay."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from .bench_engine import cache_bytes, tokens_of
from .checkpoint import Checkpoint
from .find import find_model
from .loading import open_engine
from .trace import Trace, read_trace
from .trace_record import check_parts, needed, record

SHARE = 0.25  #: part of the experts that has room, so that the next layer's router is asked


def record_routing(
    model: str | Path,
    folder: Path,
    texts: Sequence[str | None],
    tokens: int,
    parts: Collection[str],
    *,
    seed: int = 0,
    drawn: bool = True,
    show: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> Trace:
    """Decode ``tokens`` tokens of each of ``texts`` (at most so many if they are not ``drawn``),
    each a sequence, and return the trace that is written into the new ``folder``.

    ``drawn``: text i begins where ``seed`` + i draws, or again where it ends.  ``options`` are
    those of ``load`` but for sizes and ``cache``.
    """
    check_parts(parts)
    spec = (checkpoint := Checkpoint.open(find_model(model))).spec
    sizes = {"context": tokens, "answer": tokens - 1, "extra": needed(spec, parts, tokens, 1)}
    given = {**options, "predict": "router"}
    if spec.expert_count:
        given["cache"] = cache_bytes(checkpoint, SHARE)
    with open_engine(model, lambda tokenizer, spec: sizes, **given) as engine:
        record(engine, folder, parts)
        for i, text in enumerate(texts):
            if drawn or text is None:
                ids = tokens_of(engine.tokenizer, text, tokens, seed + i)
            else:
                ids = engine.encode(text)[:tokens]
            show(f"recording text {i + 1} of {len(texts)}")
            with engine.session() as session:
                session.append(ids[:1])
                session.logits()
                for token in ids[1:]:
                    session.append_sampled(token)
                    session.logits()
    return read_trace(folder)

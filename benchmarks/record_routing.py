"""Record routing of a model over texts, token by token as in decoding, for the other benchmarks.

    python benchmarks/record_routing.py OUT TEXT... [--model nano] [--tokens N]

Each text file is one sequence of at most N tokens.  A quarter of the experts fit into the cache, so
that the next layer's router is asked as it is in use.  OUT becomes a folder of
``k3offload/trace.py``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import k3offload
from k3offload.trace_record import record as record_trace


def record(out: Path, texts: list[str], model: str, tokens: int) -> int:
    """Teacher-forced decoding of ``texts``; returns how many tokens were recorded."""
    with k3offload.load(model, context=tokens) as engine:
        experts = engine.plan.experts * engine.plan.slot_bytes
    with k3offload.load(model, context=tokens, cache=experts // 4, predict="router") as engine:
        record_trace(engine, out, ("ahead",))
        count = 0
        for text in texts:
            ids = engine.encode(text)[:tokens]
            with engine.session() as session:
                session.append(ids[:1])
                session.logits()
                for token in ids[1:]:
                    session.append_sampled(token)
                    session.logits()
            count += len(ids)
            print(f"{count} tokens", file=sys.stderr)
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--model", default="nano")
    parser.add_argument("--tokens", type=int, default=850)
    given = parser.parse_args()
    texts = [path.read_text(encoding="utf-8") for path in given.texts]
    print(record(given.out, texts, given.model, given.tokens))


if __name__ == "__main__":
    main()

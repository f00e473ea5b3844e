"""Record routing of a model over texts, token by token as in decoding, for the other benchmarks.

    python -m benchmarks.record_routing OUT TEXT... [--model nano] [--tokens N] [--with latent]

Each text file is one sequence of at most N tokens.  A quarter of the experts fit into the cache, so
that the next layer's router is asked as it is in use.  OUT becomes a folder of
``k3offload/trace.py``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from k3offload.bench_routing import record_routing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--model", default="nano")
    parser.add_argument("--tokens", type=int, default=850)
    parser.add_argument("--with", action="append", default=[], dest="parts")
    given = parser.parse_args()
    texts = [path.read_text(encoding="utf-8") for path in given.texts]
    trace = record_routing(
        given.model, given.out, texts, given.tokens, ("ahead", *given.parts), drawn=False,
        show=lambda text: print(text, file=sys.stderr),
    )  # fmt: skip
    print(len(trace.best))


if __name__ == "__main__":
    main()

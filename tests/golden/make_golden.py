"""Make the golden numbers again: ``python -m tests.golden.make_golden`` from the project's root.

Checkpoints come from ``make_tiny`` (and the trained one from the package), numbers from the
float64 oracle; the tokens beside this file are the input.  Logits are stored as float32.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

from tests.helpers_golden import CASES, GOLDEN, GREEDY, golden_checkpoint, load_tokens
from tests.oracle import Oracle


def make(name: str, parent: Path) -> None:
    """Compute and store one case."""
    oracle, tokens = Oracle(golden_checkpoint(name, parent)), load_tokens(name)
    result = oracle.run(tokens)
    greedy, margins = oracle.greedy(tokens.tolist(), GREEDY)
    np.savez_compressed(
        GOLDEN / f"{name}.npz",
        logits=result.logits.astype(np.float32),
        greedy=np.array(greedy, np.int64),
        greedy_margin=np.array(margins),
        layers=np.array(result.layers, np.int64),
        experts=result.experts.astype(np.int16),
        weights=result.weights.astype(np.float32),
        margin=result.margin.astype(np.float32),
    )
    print(f"{name}: {len(tokens)} tokens", file=sys.stderr)


def main() -> None:
    """Store every case."""
    with tempfile.TemporaryDirectory() as parent:
        for name in CASES:
            make(name, Path(parent))


if __name__ == "__main__":
    main()

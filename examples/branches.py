"""Several continuations of one prompt: the prompt is computed once, the branches share sweeps.

python examples/branches.py [MODEL]
"""

from __future__ import annotations

import sys

import k3offload
from k3offload.generate import Request, Token, generate

PROMPT = "In the beginning God"


def main(model: str = "nano", branches: int = 3) -> None:
    with k3offload.load(model, sessions=branches + 1) as engine:
        trunk = engine.session()
        trunk.append(PROMPT)
        trunk.logits()
        requests = [
            Request(trunk.fork(), 24, k3offload.Sampling(temperature=0.8, top_p=0.95, seed=seed))
            for seed in range(branches)
        ]
        texts = [PROMPT] * branches
        for event in generate(engine, requests):
            if isinstance(event, Token):
                texts[event.request] += event.text
        print("\n".join(texts))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "nano")

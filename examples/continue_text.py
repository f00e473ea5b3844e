"""Continue a text, token by token, and say where the expert bytes came from.

python examples/continue_text.py [MODEL] [PROMPT]
"""

from __future__ import annotations

import sys

import k3offload
from k3offload.generate import Done, Token


def main(model: str = "nano", prompt: str = "And Jesus said unto him,") -> None:
    with k3offload.load(model, cache="1M" if model == "nano" else None) as engine:
        session = engine.session()
        session.append(prompt)
        sampling = k3offload.Sampling(temperature=0.8, top_p=0.95, seed=1)
        for event in session.generate(40, sampling):
            if isinstance(event, (Token, Done)):
                print(event.text, end="", flush=True)
        experts = engine.counts()["experts"]
        print(f"\n[{experts.hits} hits, {experts.misses} misses, {experts.bytes:,} bytes read]")


if __name__ == "__main__":
    main(*sys.argv[1:3])

"""One contender in a process of its own: loads a model, reads a prompt, goes on greedily, and says
in one line of JSON what that took.

    python -m benchmarks.baselines.contender ours --model F --budget 4000000000 --prompt 16 --new 8
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
OURS = "ours"


class Contender(Protocol):
    def __call__(self, tokens: list[int]) -> Logits:
        """Logits [V] behind ``tokens``, which follow all that it was given before."""
        ...


def ours(folder: Path, budget: int, length: int, dtype: str) -> Contender:
    """This project's engine, as ``k3offload generate --ram`` has it."""
    from k3offload.loading import load

    engine = load(folder, ram=budget, context=length, sweep=length, dtype=dtype, device="cpu")
    session = engine.session()

    def call(tokens: list[int]) -> Logits:
        if len(tokens) == 1:
            session.append_sampled(tokens[0])
        else:
            session.append(tokens)
        return np.array(session.logits(), np.float32)

    return call


def baseline(way: str, folder: Path, budget: int, dtype: str) -> Contender:
    """The torch model with its weights brought in one of the ``ways``."""
    import torch

    from benchmarks.baselines.model import Past
    from benchmarks.baselines.ways import opened

    model, past, kind = opened(folder, way, budget), Past(), getattr(torch, dtype)

    def call(tokens: list[int]) -> Logits:
        with torch.inference_mode():
            logits = model(torch.tensor(tokens), past, kind, last=True)[0]
        return logits.float().cpu().numpy()  # type: ignore[no-any-return]

    return call


def prompt_of(count: int, vocab: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(0).integers(0, min(vocab, 256), count)]


def read_bytes() -> int:
    """Bytes that drives brought for this process, by direct reads, mapped pages or otherwise."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def peak_rss() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def run(make: Callable[[], Contender], prompt: list[int], new: int) -> dict[str, Any]:
    """Load, prompt, and ``new`` tokens: seconds and bytes of each, and what was answered."""
    marks = [(time.perf_counter(), read_bytes())]
    call = make()
    marks.append((time.perf_counter(), read_bytes()))
    logits = first = call(prompt)
    marks.append((time.perf_counter(), read_bytes()))
    tokens, steps = [int(logits.argmax())], []
    for _ in range(new - 1):
        begin = time.perf_counter()
        logits = call(tokens[-1:])
        steps.append(time.perf_counter() - begin)
        tokens.append(int(logits.argmax()))
    marks.append((time.perf_counter(), read_bytes()))
    spent = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(marks)]
    (load, load_bytes), (prefill, prefill_bytes), (decode, decode_bytes) = spent
    return {
        "load_seconds": load, "load_bytes": load_bytes,
        "prefill_seconds": prefill / len(prompt), "prefill_bytes": prefill_bytes / len(prompt),
        "decode_seconds": decode / (new - 1), "decode_bytes": decode_bytes / (new - 1),
        "decode_median": float(np.median(steps)), "read_bytes": marks[-1][1] - marks[0][1],
        "peak_rss": peak_rss(), "tokens": tokens, "logits": first.tolist(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--budget", type=int, required=True)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--new", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    config = json.loads((given.model / "config.json").read_text())
    prompt = prompt_of(given.prompt, config.get("text_config", config)["vocab_size"])

    def make() -> Contender:
        if given.name == OURS:
            return ours(given.model, given.budget, given.prompt + given.new, given.dtype)
        return baseline(given.name, given.model, given.budget, given.dtype)

    json.dump(run(make, prompt, given.new), sys.stdout)


if __name__ == "__main__":
    main()

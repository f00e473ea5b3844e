"""The native matrix kernels against what this machine's memory and torch's own matmul give.

    python benchmarks/kernels.py [--threads 2] [--megabytes 256]

Prints one JSON object.  Decode figures are weight bytes per second and their share of the read
bandwidth measured beside them; prefill figures are multiply-adds per second and their ratio to one
large bfloat16 matmul of torch.  What is compared alternates, and the best of several runs counts,
so that the ratios hold on a busy machine too.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from k3offload.kernels import native
from k3offload.kernels.experts_native import experts
from k3offload.kernels.experts_reference import Job
from k3offload.kernels.glu_reference import Activation
from k3offload.kernels.int8 import Int8Weight
from k3offload.kernels.linear_native import linear
from k3offload.kernels.linear_reference import DenseWeight, Weight
from k3offload.kernels.mxfp4 import Mxfp4Weight
from k3offload.kernels.workers import Workers

K, LATENT, INNER = 7168, 3584, 3072  #: widths of the released model
PREFILL = 512, 12288, K  #: rows, N and K of the large matmul
KINDS = {"bfloat16": 2.0, "int8": 1 + 1 / 32, "mxfp4": 0.5 + 1 / 32}  #: bytes a weight


def numbers(size: int) -> torch.Tensor:
    """``size`` bytes that are ordinary numbers as bfloat16, int8 and MXFP4 alike."""
    some = torch.randint(-(1 << 15), 1 << 15, (1 << 22,), dtype=torch.int16)
    some = (some & -32513) | 0x3C00  # sign and mantissa stay, the exponent is about 2**-7
    return some.repeat(-(-size // (some.numel() * 2))).view(torch.uint8)[:size]


def weight(kind: str, memory: torch.Tensor, n: int, k: int) -> Weight:
    """A weight [n, k] of ``kind`` in ``memory``."""
    if kind == "bfloat16":
        return DenseWeight(memory[: 2 * n * k].view(torch.bfloat16).view(n, k))
    if kind == "int8":
        scale = torch.full((n, k // 64), 0.01, dtype=torch.bfloat16)
        return Int8Weight(memory[: n * k].view(torch.int8).view(n, k), scale)
    scale = torch.full((n, k // 32), 120, dtype=torch.uint8)
    return Mxfp4Weight(memory[: n * k // 2].view(n, k // 2), scale)


def best(tasks: Mapping[str, Callable[[], object]], rounds: int = 5) -> dict[str, float]:
    """Seconds of each task, the best of alternating rounds."""
    seconds = dict.fromkeys(tasks, float("inf"))
    for _ in range(rounds):
        for name, task in tasks.items():
            begin = time.perf_counter()
            task()
            seconds[name] = min(seconds[name], time.perf_counter() - begin)
    return seconds


def decode(memory: torch.Tensor, workers: Workers) -> list[dict[str, Any]]:
    """Weight bytes per second of `linear`, for each format, instruction set and rows."""
    size, found = memory.numel(), []
    for kind, width in KINDS.items():
        n = int(size / width / K) // 2 * 2
        w, touched = weight(kind, memory, n, K), n * K * width
        for isa in native.isas():
            if isa in ("amx", "portable"):  # decode is AVX-512 there; a fall-back
                continue
            for rows in (1, 4, 8) if isa == native.isas()[0] or "512" in isa else (1,):
                x = torch.randn(rows, K).bfloat16()
                with native.using(isa):
                    times = best(
                        {
                            "read": partial(native.read, workers, memory.data_ptr(), size),
                            "linear": partial(linear, x, w, workers, True),
                        }
                    )
                rate, read = touched / times["linear"], size / times["read"]
                found.append(
                    {"weight": kind, "isa": isa, "rows": rows, "gb_per_s": round(rate / 1e9, 2),
                     "read_gb_per_s": round(read / 1e9, 2), "share": round(rate / read, 3)}
                )  # fmt: skip
    return found


def prefill(memory: torch.Tensor, workers: Workers) -> dict[str, Any]:
    """Multiply-adds per second of ``PREFILL`` beside torch's."""
    rows, n, k = PREFILL
    x, work = torch.randn(rows, k).bfloat16(), rows * n * k
    weights = {kind: weight(kind, memory, n, k) for kind in KINDS}
    dense = weights["bfloat16"]
    assert isinstance(dense, DenseWeight)
    tasks: dict[str, Callable[[], object]] = {"torch": partial(F.linear, x, dense.tensor)}
    tasks |= {kind: partial(linear, x, w, workers) for kind, w in weights.items()}
    times = best(tasks, 4)
    return {
        name: {"gmac_per_s": round(work / s / 1e9, 1), "of_torch": round(times["torch"] / s, 2)}
        for name, s in times.items()
    }


def expert_times(memory: torch.Tensor, workers: Workers) -> list[dict[str, Any]]:
    """Milliseconds of an expert of released width, eight at a time."""
    page = LATENT * INNER // 2  # packed bytes of one weight
    act = Activation("situ", 4.0, 25.0)
    pages = [memory[i * page :] for i in range(memory.numel() // page)]
    jobs = [
        Job(
            weight("mxfp4", gate, INNER, LATENT),
            weight("mxfp4", up, INNER, LATENT),
            weight("mxfp4", down, LATENT, INNER),
        )
        for gate, up, down in zip(pages[0:24:3], pages[1:24:3], pages[2:24:3], strict=False)
    ]
    x, found = torch.randn(512, LATENT).bfloat16(), []
    for name, counts in (("decode", (1, 4)), ("prefill", (1, 9, 32, 128, 350))):
        for count in counts:
            picked = [job._replace(rows=torch.randperm(512)[:count].tolist()) for job in jobs]
            call = partial(experts, x, picked, act, workers, name == "decode")
            seconds = best({"": call}, 4)[""] / len(jobs)
            macs, touched = count * 3 * LATENT * INNER, 3 * page * 17 / 16
            found.append(
                {"kind": name, "rows": count, "ms": round(seconds * 1e3, 3),
                 "gmac_per_s": round(macs / seconds / 1e9, 1),
                 "gb_per_s": round(touched / seconds / 1e9, 2)}
            )  # fmt: skip
    return found


def overhead(memory: torch.Tensor, workers: Workers) -> float:
    """Microseconds of a call with a tiny weight."""
    x, w = torch.randn(1, 192).bfloat16(), weight("bfloat16", memory, 192, 192)

    def calls() -> None:
        for _ in range(200):
            linear(x, w, workers, True)

    return round(best({"": calls})[""] / 200 * 1e6, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=256)
    given = parser.parse_args()
    if not native.available():
        raise SystemExit(native.why_not())
    torch.set_num_threads(given.threads)
    workers = Workers(given.threads)
    memory = numbers(given.megabytes << 20)
    with torch.inference_mode():
        facts = {
            "threads": given.threads,
            "isas": native.isas(),
            "call_us": overhead(memory, workers),
            "decode": decode(memory, workers),
            "prefill": prefill(memory, workers),
            "experts": expert_times(memory, workers),
        }
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()

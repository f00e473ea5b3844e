"""What recording a trace costs: decode steps of one engine, with and without it, in turns.

    python -m benchmarks.record_cost [--model nano] [--tokens 64] [--turns 20] [--with PART ...]

Each turn decodes the same tokens twice from the same state, once while a trace is recorded and once
not, in an order that alternates; sweeps of both kinds find the same pages in the cache.  Prints one
JSON object: ``cost``, the median over turns of seconds with / without less 1, its quartiles, and
seconds of a token of each kind.  Half of the turns that record end a chunk of the trace at times,
so what writing it takes is in the figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import k3offload
from benchmarks.contention import machine, note
from k3offload.engine import Engine
from k3offload.session import Session
from k3offload.trace_record import record

PROMPT = "In the beginning God created the heaven and the earth."


def decode(session: Session, tokens: list[int]) -> float:
    """Seconds of decoding ``tokens``, one at a time."""
    begin = time.perf_counter()
    for token in tokens:
        session.append_sampled(token)
        session.logits()
    return time.perf_counter() - begin

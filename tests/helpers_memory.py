"""Processes whose memory is measured: what is run in them, and what the rule asks of the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tests.helpers_checkpoint import run_python

MB: Final = 1 << 20
#: 130 MB of trunk, the largest tensor 34 MB
TRUNK: Final[dict[str, Any]] = {
    "size": "small", "layers": 3, "hidden": 1024, "dense_inter": 8192, "vocab": 16_384,
    "expert_mode": "bytes", "experts": 8, "vision": False,
}  # fmt: skip
#: 74 MB of experts in 480 pages, 30 MB of trunk
STREAMED: Final[dict[str, Any]] = {
    "size": "small", "layers": 6, "experts": 96, "moe_inter": 384, "expert_mode": "bytes",
    "attn_res": 3, "vision": False,
}  # fmt: skip

HEAD: Final = """
import gc, json, os, sys, time
from pathlib import Path
import psutil
from k3offload import errors
from k3offload.loading import load
from k3offload.generate import Done
from k3offload.machine import peak_rss
from k3offload.sampling import Sampling
folder, arguments = sys.argv[1], json.loads(sys.argv[2])
me = psutil.Process()
def settled():
    gc.collect()
    return me.memory_info().rss
"""


def measure(code: str, folder: Path, **arguments: Any) -> dict[str, Any]:
    """What ``code`` prints as JSON in a process of its own."""
    run = run_python(code, [str(folder), json.dumps(arguments)])
    assert run.returncode == 0, run.stderr.decode()
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def keeps_its_word(found: dict[str, Any]) -> None:
    """peak <= plan, and not less than 3 % or 32 MB below it."""
    assert found["peak"] <= found["plan"] <= found["limit"], found
    assert found["peak"] >= found["plan"] - max(0.03 * found["plan"], 32 * MB), found

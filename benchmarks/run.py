"""What the scripts here share: lines of results, room on the disk, texts of drawn words.

Everything that measures one model is a command, ``k3offload bench``; scripts are for questions of
this project: scenarios, fits, kills, a GPU.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from k3offload.contention import Background, machine

__all__ = ["ROOT", "contention", "machine", "need_room", "note", "some_words", "tell"]

ROOT = Path(__file__).parent
WORDS = "and it came to pass that the people of the city went up in those days"
_background = Background()  #: since the process began, or the last line


def contention() -> dict[str, Any]:
    """Whether the machine was this process's alone since the process began, or since the last
    call: ``clean``, and why not."""
    global _background
    found, _background = _background.read(), Background()
    return found


def note(facts: dict[str, Any]) -> None:
    """Append one line to the results of this processor, marked if others used the machine while it
    was measured."""
    facts = {**facts, **contention()}
    name = re.sub(r"[^a-z0-9]+", "-", facts["cpu"].lower()).strip("-")
    results = ROOT / "results"
    results.mkdir(exist_ok=True)
    with (results / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(facts) + "\n")


def tell(line: dict[str, Any]) -> None:
    """``note`` a line, and print it."""
    note(line)
    for name, value in line.items():
        print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")


def need_room(gigabytes: int) -> None:
    """End where the folder for temporary files has less than that free."""
    if shutil.disk_usage(tempfile.gettempdir()).free < gigabytes * 1e9:
        raise SystemExit(f"{gigabytes} GB are needed in {tempfile.gettempdir()} (set TMPDIR).")


def some_words(drawn: random.Random, count: int) -> str:
    """``count`` words."""
    known = WORDS.split()
    return " ".join(drawn.choice(known) for _ in range(count))

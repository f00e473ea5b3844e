"""This project's engine beside what a user would pick instead, on the same checkpoint and budget.

    python -m benchmarks.baselines --model FOLDER --budget 4G [--contender mmap ...] [--rounds 1]

Every contender runs in a process of its own, inside a memory control group as large as the budget,
with the model's files out of the page cache.  It reads a prompt and goes on greedily.  A line for
each is printed and kept in ``benchmarks/results/``: bytes that drives brought (``/proc/PID/io``),
seconds a token, the group's peak, and whether it chose the same tokens.  Where no group can be
made, or files stay in the page cache, the line says that it is not comparable, and why.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.baselines.cgroup import Group, make_group
from benchmarks.baselines.cold import evict
from benchmarks.baselines.contender import OURS
from benchmarks.run import contention, machine, note
from k3offload.config import parse_size, show_size

#: by name: how its weights come, and whether it runs inside the budget
CONTENDERS = {
    OURS: (OURS, True),
    "accelerate-disk": ("accelerate-disk", True),
    "accelerate-auto": ("accelerate-auto", True),
    "accelerate-cpu": ("accelerate-cpu", True),
    "mmap": ("mmap", True),
    "resident": ("resident", True),
    "resident-unlimited": ("resident", False),
}
COLD = 0.01  #: part of the model that may stay in the page cache
ROOT = Path(__file__).parent.parent.parent
Line = dict[str, Any]
_asked: list[int] = []  #: signals to end by


def contend(name: str, given: argparse.Namespace) -> Line:
    """What one contender took, or why it came to no end."""
    way, bounded = CONTENDERS[name]
    files = sorted(given.model.glob("*.safetensors"))
    whole = sum(file.stat().st_size for file in files)
    warm = evict(files)
    group = make_group(f"k3-baseline-{os.getpid()}", given.budget) if bounded else None
    command = [
        sys.executable, "-m", "benchmarks.baselines.contender", way,
        "--model", str(given.model), "--budget", str(given.budget),
        "--prompt", str(given.prompt), "--new", str(given.new), "--dtype", given.dtype,
    ]  # fmt: skip
    free = psutil.virtual_memory().available
    try:
        if not bounded and free < 1.2 * whole:
            found = Line(failed=f"{show_size(free)} of memory are free, for {show_size(whole)}")
        else:
            found = _run(command if group is None else [*group.joining, *command], given.timeout)
        if group is not None:
            found |= {"peak_bytes": group.peak()}
            if "failed" in found and group.killed():
                found["failed"] = f"killed: it needs more than {show_size(given.budget)}"
    finally:
        if group is not None:
            group.remove()
    reasons = _not_comparable(bounded, group, warm, whole)
    return {"contender": name, "comparable": not reasons, "reasons": reasons, **found}


def _not_comparable(bounded: bool, group: Group | None, warm: int, whole: int) -> list[str]:
    reasons = []
    if not bounded:
        reasons.append("not comparable: no limit of memory, on purpose")
    elif group is None:
        reasons.append("not comparable: no memory control group can be made here")
    if warm > COLD * whole:
        reasons.append(f"not comparable: {show_size(warm)} stayed in the page cache")
    return reasons


def _run(command: list[str], timeout: float) -> Line:
    """The line of JSON that ``command`` prints; ``failed`` says why there is none."""
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT
        ) as done,
    ):
        until = time.monotonic() + timeout
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    said, _ = done.communicate(timeout=0.2)
                    break
                _end_if_asked()
                if time.monotonic() > until:
                    return {"failed": f"not done after {timeout:.0f} seconds"}
        finally:
            done.kill()
        if done.returncode == 0:
            return dict(json.loads(said))
        errors.seek(0)
        lines = errors.read().strip().splitlines()
        return {"failed": lines[-1][:300] if lines else f"ended with {done.returncode}"}


def _end_if_asked() -> None:
    """Signals are heard of where nothing is half made: a group that nobody knows of yet, or a
    process that nobody ends, would stay."""
    if _asked:
        sys.exit(128 + _asked[0])


def read_ahead(file: Path) -> int | None:
    """Bytes that the system reads ahead when mapped pages of ``file`` are touched."""
    device = file.stat().st_dev
    place = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for folder in (place, place.resolve().parent):  # a partition's is that of its drive
        try:
            return int((folder / "queue" / "read_ahead_kb").read_text()) * 1024
        except OSError:
            continue
    return None


def judged(line: Line, ours: Line | None) -> Line:
    """``line`` with its answer beside ours: tokens that are equal before the first that is not,
    and the relative error of the logits behind the prompt."""
    tokens, logits = line.pop("tokens", None), line.pop("logits", None)
    if ours is None or tokens is None or "tokens" not in ours:
        return line
    pairs = list(zip(tokens, ours["tokens"], strict=True))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    a, b = np.array(logits), np.array(ours["logits"])
    error = float(np.linalg.norm(a - b) / np.linalg.norm(b))
    return {**line, "greedy": {"equal": same, "of": len(pairs), "logits_error": error}}


HEAD = (
    f"{'contender':<20}{'load':>9}{'prefill':>11}{'decode':>11}{'bytes a token':>15}{'in all':>10}"
    f"{'peak':>10}{'rss':>10}  greedy"
)


def row(line: Line) -> str:
    """Of the table under ``HEAD``: seconds, seconds a token, bytes of a decoded token and of the
    whole run, peaks, equal tokens; and what is wrong."""
    notes = "".join(f"  ({reason})" for reason in line["reasons"])
    if "failed" in line:
        return f"{line['contender']:<20}{line['failed']}{notes}"
    greedy, peak = line.get("greedy"), line.get("peak_bytes")
    says = f"{greedy['equal']}/{greedy['of']} equal" if greedy else "-"
    return (
        f"{line['contender']:<20}{line['load_seconds']:>7.1f} s{line['prefill_seconds']:>9.3f} s"
        f"{line['decode_seconds']:>9.3f} s{show_size(round(line['decode_bytes'])):>15}"
        f"{show_size(line['read_bytes']):>10}{show_size(peak) if peak else '-':>10}"
        f"{show_size(line['peak_rss']):>10}  {says}{notes}"
    )


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--budget", type=parse_size, required=True, help="like 4G")
    parser.add_argument("--contender", action="append", choices=list(CONTENDERS))
    parser.add_argument("--prompt", type=int, default=16, help="tokens")
    parser.add_argument("--new", type=int, default=8, help="tokens; 2 or more")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of a contender")
    parser.add_argument("--no-results", action="store_true", help="print only")
    given = parser.parse_args(words)
    if given.new < 2 or given.prompt < 1 or given.rounds < 1:
        parser.error("--new must be 2 or more, --prompt and --rounds 1 or more")
    given.model = given.model.resolve()
    return given


def main(words: list[str] | None = None) -> None:
    given = arguments(words)
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: _asked.append(number))
    names = given.contender or list(CONTENDERS)
    names.sort(key=lambda name: name != OURS)  # the others' answers are held beside ours
    about = {
        "benchmark": "baselines", "model": given.model.name, "budget": given.budget,
        "prompt": given.prompt, "new": given.new, "dtype": given.dtype,
        "read_ahead_bytes": read_ahead(given.model / "config.json"),
    }  # fmt: skip
    print(HEAD)
    reference: Line | None = None
    for _ in range(given.rounds):
        for name in names:
            _end_if_asked()
            contention()  # from here on
            line = contend(name, given)
            if name == OURS:
                reference = dict(line)
            line = judged(line, reference)
            print(row(line), flush=True)
            if not given.no_results:
                note({**about, **machine(), **line})
    _end_if_asked()


if __name__ == "__main__":
    main()

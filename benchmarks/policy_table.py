"""Which policy at which budget: tables in Markdown of what ``bench policies --json`` wrote.

    python -m benchmarks.policy_table RESULTS.jsonl [NAME ...]

NAMEs stand for the traces, in their order.  Bytes of each policy without a predictor, as a share of
LRU's, which stand in bytes beside them, and the same of MIN (Belady's optimum).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from k3offload.config import show_size


def tables(lines: Sequence[dict[str, Any]], names: Sequence[str]) -> Iterator[str]:
    """A table for each trace; the policy that reads least is bold."""
    policies = list(dict.fromkeys(line["policy"] for line in lines if line["policy"] != "lru"))
    for number, path in enumerate(dict.fromkeys(line["path"] for line in lines)):
        own = [line for line in lines if line["path"] == path and line["predictor"] == "none"]
        name = names[number] if number < len(names) else Path(path).name
        yield (
            f"**{name}**: {own[0]['rows']:,} tokens in {own[0]['sequences']} sequences, "
            f"{own[0]['requests']:,} requests, digest `{own[0]['trace']}`\n"
        )
        yield f"| budget | lru, bytes | {' | '.join(policies)} | MIN | gap closed |"
        yield "|---" * (len(policies) + 4) + "|"
        for capacity in dict.fromkeys(line["capacity"] for line in own):
            here = {line["policy"]: line for line in own if line["capacity"] == capacity}
            some = next(iter(here.values()))
            lru = some["lru_bytes"]
            best = min(here, key=lambda policy: here[policy]["bytes"])
            cells = [f"{100 * here[policy]['bytes'] / lru:.1f} %" for policy in policies]
            cells = [f"**{cell}**" if policy == best else cell
                     for policy, cell in zip(policies, cells, strict=True)]  # fmt: skip
            least = 100 * some["min_bytes"] / lru
            yield (
                f"| {capacity} | {show_size(lru)} | {' | '.join(cells)} | {least:.1f} % | "
                f"{100 * here[best]['gap_closed']:.0f} % |"
            )
        yield ""


def main() -> None:
    path, *names = sys.argv[1:]
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    print("\n".join(tables(lines, names)))


if __name__ == "__main__":
    main()

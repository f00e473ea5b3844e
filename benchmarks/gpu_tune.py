"""``gpu_suite.py --tune``: what of the candidates is fastest on this GPU, as an entry of the table.

A candidate that changed a bit would be no candidate: each result is compared with the default's.
One that does, or cannot run, is an error once all others have been measured: time on a GPU is dear.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from benchmarks.gpu_cases import Case, to
from k3offload.kernels.choose import Kernels
from k3offload.kernels.tuning import CANDIDATES, entry_of, trying

#: The cases that a field has a part in.
USES: Final = {
    "decode_stages": r"linear \w+ 1$|experts \d+ x 1$",
    "tile_stages": r"linear \w+ \d\d|experts \d+ x (?!1$)",
    "attend_stages": r"mla_",
    "expand_stages": r"mla_prefill",
}
Seconds = Callable[[Callable[[], object]], float]


def ratios_of(
    case: Case,
    field: str,
    kernels: Kernels,
    where: torch.device,
    seconds: Seconds,
    refused: list[str],
) -> dict[int, float]:
    """Value -> time of ``case`` over its time by default.  Values that change a bit or cannot run
    are not there; ``refused`` is told why."""
    default, inputs = entry_of(""), to(case.inputs, where)
    usual, base, found = getattr(default, field), 0.0, dict[int, float]()
    try:
        want = case.call(kernels, inputs)
    except Exception as error:
        refused.append(f"{case.name} cannot run ({error!r})")
        return found
    for value in (usual, *(v for v in CANDIDATES[field] if v != usual)):
        with trying(default._replace(**{field: value})):
            try:
                got = case.call(kernels, inputs)
            except Exception as error:
                refused.append(f"{field}={value} cannot run {case.name} ({error!r})")
                continue
            if not all(torch.equal(a, b) for a, b in zip(want, got, strict=True)):
                refused.append(f"{field}={value} changes bits of {case.name}")
                continue
            took = seconds(lambda: case.call(kernels, inputs))
        base = base or took
        found[value] = took / base
    return found


def tune(
    every: Iterable[Case],
    kernels: Kernels,
    where: torch.device,
    seconds: Seconds,
    left: Callable[[], float],
    tell: Callable[[dict[str, Any]], None] = lambda line: None,
) -> dict[str, Any]:
    """The geometric mean of the ratios of all cases, by field and value, and the best of each.
    ``tell`` hears of each case at once.  ``AssertionError`` at the end if a value was refused."""
    refused: list[str] = []
    logs: dict[str, dict[int, list[float]]] = {f: {v: [] for v in CANDIDATES[f]} for f in USES}
    for case in every:
        for field, pattern in USES.items():
            if left() > 0 and re.match(pattern, case.name):
                found = ratios_of(case, field, kernels, where, seconds, refused)
                tell({"part": "tune", "case": case.name, "field": field, "ratios": found})
                for value, ratio in found.items():
                    logs[field][value].append(math.log(ratio))
    assert not refused, "; ".join(refused)
    means = {
        field: {v: math.exp(sum(x) / len(x)) for v, x in of.items() if x}
        for field, of in logs.items()
    }
    best = {field: min(of, key=lambda v: of[v]) for field, of in means.items() if of}
    return {"part": "tune", "ratios": means, "entry": best}


def entry_text(name: str, entry: dict[str, int]) -> str:
    """The line to put into ``kernels/tuning.json``."""
    return f"{json.dumps(name)}: {json.dumps(entry)}"

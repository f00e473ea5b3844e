"""Answers to the rows of a table, by one engine on each machine of a Ray cluster.

python examples/batch_ray.py [MODEL [TABLE.parquet]]          starts Ray here, for a try
RAY_ADDRESS=auto python examples/batch_ray.py MODEL TABLE     on a node of a cluster that runs

For pipelines of your own: what comes before and after the answers is any Ray Data.  Each machine
needs `pip install 'k3offload[ray]'` of the same version and the model under the same path.  A file
that survives a kill of this process as well is what `k3offload batch --ray` writes.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import ray
import ray.data

import k3offload

PROMPT = "{text}, and the king said"
SESSIONS = 8  #: documents that share a sweep
TEXTS = ["And it came to pass", "In those days", "The people went up", "Then spake Solomon"]


class Answers:
    """Ray makes one for each node, keeps it, and makes another one if it dies."""

    def __init__(self, model: str, threads: int) -> None:
        self.engine = k3offload.load(model, sessions=SESSIONS, context=1024, threads=threads)

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        """``rows`` with their answers; what is wrong with a row stands in it, and ends no other."""
        texts = rows["text"].tolist()
        results = list(self.engine.batch(texts, prompt=PROMPT, max_new_tokens=16))
        answers = [result.text for result in results]
        errors = [str(result.error or "") for result in results]
        return {"text": texts, "answer": answers, "error": errors}


def main(model: str = "nano", table: str | None = None) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # nothing is reported to Ray's makers
    ray.init(log_to_driver=False)
    # Each engine computes with all CPUs of its node and claims them, so no second one comes there.
    nodes = [n["Resources"]["CPU"] for n in ray.nodes() if n["Alive"] and "CPU" in n["Resources"]]
    cpus = int(min(nodes))
    # A sweep takes as long as it takes: without this Ray Data gives up after half an hour.
    ray.data.DataContext.get_current().execution_no_progress_timeout_s = -1
    if table is None:
        rows = ray.data.from_items([{"text": text} for text in TEXTS])
    else:
        rows = ray.data.read_parquet(table, columns=["text"], num_cpus=0)
    answers = rows.map_batches(
        Answers,
        fn_constructor_args=(os.path.abspath(model) if os.path.isdir(model) else model, cpus),
        batch_size=4 * SESSIONS,  # larger blocks keep sweeps full, smaller ones lose less
        compute=ray.data.ActorPoolStrategy(size=len(nodes), max_tasks_in_flight_per_actor=1),
        num_cpus=cpus,
    )
    for row in answers.iter_rows():
        print(json.dumps(row))
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What a server has done, in the text format of Prometheus; counted when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .serve_engine import EngineThread

_TIER = (
    ("requests", "Pages asked for: hits + late + misses", "requests"),
    ("hits", "Pages that were there in time", "hits"),
    ("late", "Pages that were joined while they were loading", "late"),
    ("misses", "Pages read on demand", "misses"),
    ("read_bytes", "Bytes of the reads that were started", "bytes"),
    ("wait_seconds", "Seconds that somebody waited for pages", "wait_seconds"),
    ("prefetches", "Reads that nobody waited for yet", "prefetches"),
    ("prefetches_useful", "Of these, asked for afterwards", "useful"),
    ("prefetches_wasted", "Of these, evicted, cancelled or failed before that", "wasted"),
)
_TOTALS = {
    "sweeps": "Passes over all layers",
    "sweep_seconds": "Seconds in sweeps",
    "prompt_tokens": "Prompt tokens of requests that have ended well",
    "reused_tokens": "Of these, taken from a kept prefix",
    "new_tokens": "Tokens sampled",
    "finished": "Requests that have ended well",
    "failed": "Requests that have failed",
    "cancelled": "Requests under way that nobody wanted any more",
}
#: Paths that are told apart; anybody may ask for others without end.
_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics", "/")


class Metrics:
    """Of one server."""

    def __init__(self, thread: EngineThread) -> None:
        self._registry = CollectorRegistry()
        self._answers = Counter(
            "k3_http_answers", "Answers by path and status", ["path", "status"],
            registry=self._registry,
        )  # fmt: skip
        self._registry.register(_OfEngine(thread))

    def seen(self, method: str, path: str, status: int) -> None:
        """A request was answered."""
        self._answers.labels(path if path in _PATHS else "other", str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _OfEngine(Collector):
    """Reads what the engine and its thread count anyway."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread

    def collect(self) -> Iterator[Metric]:
        thread, engine = self._thread, self._thread.engine
        counts = engine.counts()
        for name, what, field in _TIER:
            family = CounterMetricFamily(f"k3_tier_{name}", f"{what}, by tier", labels=["tier"])
            for tier, counted in counts.items():
                family.add_metric([tier], getattr(counted, field))
            yield family
        read = CounterMetricFamily("k3_disk_read_bytes", "Bytes read from the model's files")
        read.add_metric([], engine.disk.counts.bytes)
        yield read
        for name, value in thread.totals._asdict().items():
            family = CounterMetricFamily(f"k3_{name}", _TOTALS[name])
            family.add_metric([], value)
            yield family
        running = thread.running()
        for name, what, level in (
            ("running", "Requests under way", len(running)),
            ("waiting", "Requests in the queue", len(thread.waiting())),
            ("places", "Answers that can be under way at a time", thread.places),
            ("prompt_tokens_left", "Prompt tokens still to be computed of those under way",
             sum(view.prompt_total - view.prompt_done for view in running)),
            ("alive", "1 while requests are taken", int(thread.alive)),
        ):  # fmt: skip
            yield GaugeMetricFamily(f"k3_{name}", what, value=float(level))

"""What /metrics tells, in Prometheus' terms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.generate import Result
from runtime.monitor import Counters

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
BYTES = tuple(4.0**power for power in range(5, 17))  # 1 KiB to 4 GiB


class Watched(Collector):
    """What the runtime's monitors count, by the level that was asked for."""

    def __init__(self, watched: Callable[[], dict[str, Counters]]) -> None:
        self._watched = watched

    def collect(self) -> Iterator[Metric]:
        levels = self._watched()
        for field in fields(Counters):
            metric = CounterMetricFamily(f"unicache_monitor_{field.name}", "See runtime/monitor.py", labels=["level"])
            for level, counters in levels.items():
                metric.add_metric([level], getattr(counters, field.name))
            yield metric


class Counted(Collector):
    """A counter that is asked for when it is told."""

    def __init__(self, name: str, what: str, value: Callable[[], float]) -> None:
        self._name, self._what, self._value = name, what, value

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._what, value=self._value())


class Metrics:
    """One server's; a registry of its own, so that two servers in one process do not share it."""

    def __init__(self, watched: Callable[[], dict[str, Counters]]) -> None:
        """
        Args:
            watched: the monitor's counters, by level.
        """
        self.registry = registry = CollectorRegistry()
        registry.register(Watched(watched))
        ProcessCollector(registry=registry)
        self.responses = Counter("unicache_responses", "HTTP responses", ["path", "status"], registry=registry)
        self.answers = Counter("unicache_answers", "Answers by level", ["level", "finish_reason"], registry=registry)
        self.prompt = Counter("unicache_prompt_tokens", "Tokens of prompts, unpruned", ["level"], registry=registry)
        self.tokens = Counter("unicache_generated_tokens", "Tokens of answers", ["level"], registry=registry)
        self.kept = Counter("unicache_visual_tokens", "Visual tokens that were kept", ["level"], registry=registry)

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"unicache_{name}", what, ["level"], buckets=buckets, registry=registry)

        self.waited = histogram("waiting_seconds", "From a request's arrival to its turn", SECONDS)
        self.first = histogram("first_text_seconds", "From a request's arrival to its first text", SECONDS)
        self.answered = histogram("answer_seconds", "Computing an answer", SECONDS)
        self.kv = histogram("kv_bytes", "KV cache of a request, all that is allocated", BYTES)
        self.kv_uncompressed = histogram("kv_bytes_uncompressed", "An fp16 KV cache of the same tokens", BYTES)

    def gauge(self, name: str, what: str, value: Callable[[], float]) -> None:
        """A value that is asked for when it is told."""
        Gauge(f"unicache_{name}", what, registry=self.registry).set_function(value)

    def counter(self, name: str, what: str, value: Callable[[], float]) -> None:
        """A counter that is asked for when it is told."""
        self.registry.register(Counted(f"unicache_{name}", what, value))

    def answer(self, result: Result, waited: float, first: float) -> None:
        """Count an answer; from the worker's thread."""
        stats = result.stats
        self.answers.labels(stats.level, result.finish_reason).inc()
        self.prompt.labels(stats.level).inc(stats.prompt_tokens)
        self.tokens.labels(stats.level).inc(stats.generated_tokens)
        self.kept.labels(stats.level).inc(stats.visual_tokens)
        self.waited.labels(stats.level).observe(waited)
        if first:
            self.first.labels(stats.level).observe(first)
        self.answered.labels(stats.level).observe(sum(stats.seconds.values()))
        if stats.kv_bytes:
            self.kv.labels(stats.level).observe(stats.kv_bytes)
            self.kv_uncompressed.labels(stats.level).observe(stats.kv_bytes_uncompressed)

    def text(self) -> bytes:
        return generate_latest(self.registry)

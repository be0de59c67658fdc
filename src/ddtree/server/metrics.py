"""Prometheus metrics: the engine's snapshot, read at each scrape, and what the server itself sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ddtree.engine.counters import Snapshot
from ddtree.engine.request import Completion

__all__ = ["Metrics"]

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """One server's metrics. Engine metrics appear once there is an engine."""

    def __init__(self, snapshot: Callable[[], Snapshot | None]) -> None:
        """snapshot: the engine's numbers, None while it is loading."""
        self._registry = CollectorRegistry()
        self._registry.register(_Engine(snapshot))
        self._requests = Counter(
            "ddtree_http_requests", "HTTP requests answered.", ("route", "status"), registry=self._registry
        )
        self._seconds = Histogram(
            "ddtree_http_request_seconds",
            "From a request's arrival to its last byte.",
            ("route",),
            buckets=SECONDS,
            registry=self._registry,
        )
        self._first = Histogram(
            "ddtree_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=SECONDS,
            registry=self._registry,
        )
        self._per_token = Histogram(
            "ddtree_time_per_output_token_seconds",
            "Seconds for each token after the first, one sample an answer.",
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5),
            registry=self._registry,
        )
        self._stuck = Gauge(
            "ddtree_round_stuck", "1 while a round takes longer than the watchdog allows.", registry=self._registry
        )
        self._ready = Gauge("ddtree_ready", "1 once the model is loaded and warm.", registry=self._registry)

    def request(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def answered(self, completion: Completion) -> None:
        speed = completion.tokens_per_second
        if speed:
            self._per_token.observe(1 / speed)

    def stuck(self, stuck: bool) -> None:
        self._stuck.set(stuck)

    def ready(self, ready: bool) -> None:
        self._ready.set(ready)

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)


class _Engine(Collector):
    """An engine's snapshot as metric families."""

    def __init__(self, snapshot: Callable[[], Snapshot | None]) -> None:
        self._snapshot = snapshot

    def describe(self) -> list[Metric]:
        return []  # nothing to collect before there is an engine

    def collect(self) -> Iterator[Metric]:
        now = self._snapshot()
        if now is None:
            return
        yield GaugeMetricFamily("ddtree_requests_running", "Requests that hold a seat.", now.running)
        yield GaugeMetricFamily("ddtree_requests_waiting", "Accepted requests without a seat.", now.waiting)
        pages = GaugeMetricFamily("ddtree_cache_pages", "Pages of the cache by what they hold.", labels=("state",))
        pages.add_metric(("used",), now.pages_used)
        pages.add_metric(("cached",), now.pages_cached)
        pages.add_metric(("free",), now.pages_total - now.pages_used - now.pages_cached)
        yield pages
        yield CounterMetricFamily("ddtree_prompt_tokens", "Tokens of prompts begun.", now.prompt_tokens)
        yield CounterMetricFamily(
            "ddtree_prefix_hit_tokens", "Tokens of prompts found in the prefix cache.", now.prefix_hit_tokens
        )
        yield CounterMetricFamily("ddtree_preemptions", "Requests set back into the queue.", now.preemptions)
        finished = CounterMetricFamily(
            "ddtree_requests_finished", "Requests by how they ended.", labels=("reason",)
        )
        for reason, count in now.finished.items():
            finished.add_metric((reason,), count)
        yield finished
        yield from _by_mode(now)
        phases = CounterMetricFamily("ddtree_phase_seconds", "Host seconds in each phase.", labels=("phase",))
        for phase, seconds in now.phase_seconds.items():
            phases.add_metric((phase,), seconds)
        yield phases
        yield GaugeMetricFamily(
            "ddtree_zero_acceptance_rounds",
            "Drafting rounds in a row in which nothing drafted was accepted.",
            now.zero_acceptance_rounds,
        )
        yield GaugeMetricFamily(
            "ddtree_zero_acceptance_alarm",
            "1 when those are so many that something must be wrong with the drafter.",
            float(now.zero_acceptance),
        )
        yield GaugeMetricFamily(
            "ddtree_seconds_since_round", "Since the last round began; 0 when idle.", now.since_round_s or 0.0
        )


def _by_mode(now: Snapshot) -> Iterator[Metric]:
    texts = {
        "rounds": "Rounds, one for each request in a batch.",
        "emitted": "Tokens that rounds added to texts, bonus included.",
        "drafted": "Drafted nodes that were verified.",
        "accepted": "Drafted tokens that were emitted.",
    }
    names = {"rounds": "ddtree_rounds", "emitted": "ddtree_emitted_tokens"}
    names |= {"drafted": "ddtree_drafted_tokens", "accepted": "ddtree_accepted_tokens"}
    for key, name in names.items():
        family = CounterMetricFamily(name, texts[key], labels=("mode",))
        for mode, counts in now.modes.items():
            family.add_metric((mode,), getattr(counts, key))
        yield family
    length = GaugeMetricFamily(
        "ddtree_acceptance_length", "Emitted tokens per round since the start.", labels=("mode",)
    )
    for mode, counts in now.modes.items():
        if counts.rounds:
            length.add_metric((mode,), counts.emitted / counts.rounds)
    yield length
    for key, text in (("offered", "something was drafted"), ("accepted", "a drafted token was emitted")):
        family = CounterMetricFamily(
            f"ddtree_position_{key}", f"Rounds in which {text} at this depth.", labels=("mode", "depth")
        )
        for mode, counts in now.modes.items():
            for depth, count in enumerate(getattr(counts, f"{key}_by_depth"), start=1):
                family.add_metric((mode, str(depth)), count)
        yield family

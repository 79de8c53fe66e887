"""Metrics of the API for Prometheus, built with its services."""

import os
from collections.abc import Callable, Iterable
from functools import cache

from prometheus_client import CollectorRegistry, Gauge, Histogram, Metric, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_REQUEST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_BLOCK_S = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)
_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"


class _Histograms(MultiProcessCollector):
    """Sums over the processes, without their gauges, which prometheus_client keeps in files, too."""

    def collect(self) -> Iterable[Metric]:
        found: Iterable[Metric] = super().collect()  # type: ignore[no-untyped-call]
        return [metric for metric in found if metric.type == "histogram"]


class ApiMetrics:
    """Reading changes none of them, so that any number of scrapers see the same.

    Under `serve` prometheus_client keeps the counts of each process in a file. Any process tells the sums, in
    which those that have ended still count: a sum that falls would look like a restart of the server. Gauges
    are of the server, and the process that is asked reads them.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()  # gauges
        self._counts = CollectorRegistry()
        requests = Histogram(
            "skyrl_tinker_http_request_seconds",
            "From a request's head to the end of its answer, by route and class of the status. Of long polls "
            "(retrieve_future, retrieve_futures) it is the wait for a result",
            ("method", "route", "status"),
            buckets=_REQUEST_S,
            registry=self._counts,
        )
        self._requests = cache(requests.labels)  # which itself checks, formats and locks
        self._blocks = Histogram(
            "skyrl_tinker_api_loop_block_seconds",
            "Lateness of a task that sleeps for 10 ms each time: how long the API's event loop was "
            "blocked, underestimated by at most 10 ms",
            buckets=_BLOCK_S,
            registry=self._counts,
        )
        self._engine_up = self._gauge("engine_up", "Whether the engine answers")
        self._ready = self._gauge("ready", "Whether the engine processes requests")

    def requested(self, method: str, route: str, status: str, seconds: float) -> None:
        """Count a request. Labels must come from closed sets."""
        self._requests(method, route, status).observe(seconds)

    def blocked(self, seconds: float) -> None:
        """Count a wake-up of the event loop that was so late."""
        self._blocks.observe(seconds)

    def watch(self, name: str, help_text: str, value: Callable[[], float]) -> None:
        """Register a gauge whose value is read at each scrape."""
        self._gauge(name, help_text).set_function(value)

    def text(self, *, engine_up: bool, ready: bool) -> bytes:
        """Return the exposition format; its content type is CONTENT_TYPE."""
        self._engine_up.set(engine_up)
        self._ready.set(ready)
        return generate_latest(self._summed()) + generate_latest(self._registry)

    def _summed(self) -> CollectorRegistry:
        """Return the counts of all processes that have the same directory of them, else of this one."""
        if _DIRECTORY not in os.environ:
            return self._counts
        sums = CollectorRegistry()
        _Histograms(sums)  # type: ignore[no-untyped-call]
        return sums

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(f"skyrl_tinker_{name}", help_text, registry=self._registry)

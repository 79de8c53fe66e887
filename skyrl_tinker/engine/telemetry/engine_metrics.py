"""Metrics for Prometheus: one object, made in the composition root and passed to the parts."""

import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from skyrl_tinker.domain.ids import FutureStatus, OwnerId, RequestKind
from skyrl_tinker.domain.values import Failure, PassOutput
from skyrl_tinker.engine.scheduling.row_work import PASSES
from skyrl_tinker.engine.scheduling.throughput import TokenMeter
from skyrl_tinker.engine.telemetry.activity_log import ActivityLog
from skyrl_tinker.store.futures.queue import QueuedRow

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "skyrl_tinker"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_TOKENS = tuple(float(2**power) for power in range(4, 21, 2))
_GAPS = (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.25, 0.5, 1)
PASS = "pass"
BASE = "base_model"
"""Label of the series of trainers and samplers, which each base model has."""
OPENAI = "openai"
OutcomeLabel = Literal["ok", "user", "server", "unknown", "cancelled"]


MOST_OWNERS = 20
OTHERS = "(other)"
"""Label of owners beyond the first MOST_OWNERS; no key can have this name."""
OwnerName = Callable[[OwnerId | None], Awaitable[str | None]]
"""Function that returns the name of an owner, None while the store fails."""


class OwnerMetrics:
    """Counters with the names of keys as labels, for the first MOST_OWNERS owners since the engine started.

    Each owner costs a series per kind of request, and Prometheus keeps the series of deleted keys.
    """

    def __init__(self, counter: Callable[..., Callable[..., Counter]], name: OwnerName | None) -> None:
        """`counter`: (name, help, labels) -> counter.

        Counts nothing if `name` is None: names and activities of owners are not public.
        """
        self._name = name
        self._labels: dict[OwnerId | None, str] = {}
        by = "by the key's name (setting metrics_key)"
        self._requests = counter("owner_requests", f"Requests answered, {by}", "owner", "kind")
        self._trained = counter("owner_trained_tokens", f"Tokens through the trainer, {by}", "owner")
        self._sampled = counter("owner_sampled_tokens", f"Tokens generated, {by}", "owner")

    async def know(self, owners: Iterable[OwnerId | None]) -> None:
        """Give owners their labels, before any of their requests is counted."""
        for owner in owners:
            if self._name is None or owner in self._labels or len(self._labels) == MOST_OWNERS:
                continue
            if (name := await self._name(owner)) is not None:
                self._labels[owner] = name

    def answered(self, owner: OwnerId | None, kind: str) -> None:
        if self._name is not None:
            self._requests(self._label(owner), kind).inc()

    def trained(self, owner: OwnerId | None, tokens: int) -> None:
        if self._name is not None:
            self._trained(self._label(owner)).inc(tokens)

    def sampled(self, owner: OwnerId | None, tokens: int) -> None:
        if self._name is not None:
            self._sampled(self._label(owner)).inc(tokens)

    def _label(self, owner: OwnerId | None) -> str:
        return self._labels.get(owner, OTHERS)


class Metrics:
    """Counters, gauges and histograms.

    Labels are bounded: kinds, outcomes, the server's base models and a few owners, never models in training.
    """

    def __init__(self, owner_name: OwnerName | None = None, clock: Callable[[], float] = time.time) -> None:
        """`owner_name`: for counters by owner; None: no such counters. `clock`: that of the times in rows."""
        self._clock = clock
        self._registry = CollectorRegistry()
        self._watched: dict[str, Callable[..., Gauge]] = {}  # by name
        self._pending: dict[int, QueuedRow] = {}  # by future id
        self._begun: set[int] = set()  # of those pending
        self._since = clock()
        self._last_refused = 0  # future id
        self._requests = self._counter("requests", "Requests answered", "kind", "outcome")
        self._latency = self._histogram(
            "request_seconds", "From a request's acceptance to its answer", _SECONDS, "kind"
        )
        self._waits = self._histogram(
            "queue_wait_seconds",
            "From a request's acceptance to the start of its work; of kind openai: to its turn",
            _SECONDS,
            "kind",
        )
        self._unit_seconds = self._histogram(
            "unit_seconds",
            "Time of a unit of the trainer's work: a pass, the optim_steps of one or several models, a save",
            _SECONDS,
            BASE,
            "kind",
        )
        self._unit_rows = self._histogram(
            "unit_requests", "Requests in one training pass", (1, 2, 4, 8, 16, 32, 64), BASE
        )
        self._unit_tokens = self._histogram("unit_tokens", "Tokens in one training pass", _TOKENS, BASE)
        self._trained = self._counter("trained_tokens", "Tokens through the trainer", BASE, "kind")
        self._sampled = self._counter("sampled_tokens", "Tokens generated", BASE)
        self._publish = self._histogram(
            "publish_seconds", "From a captured save to its answer; one sync each", _SECONDS, BASE, "weights"
        )
        self._sync = self._histogram(
            "weight_sync_seconds", "Time of one sync of full parameters to the samplers", _SECONDS, BASE
        )
        self._pause = self._histogram(
            "weight_sync_pause_seconds",
            "Part of a sync in which the samplers' requests are paused",
            _SECONDS,
            BASE,
        )
        self._gap = self._gauge(
            "sampler_logprob_gap", "Largest |sampler - trainer| logprob on the probe of the last sync", BASE
        )
        self._largest_gaps: dict[str, float] = {}  # by base model
        self._gap_max = self._gauge("sampler_logprob_gap_max", "The largest since the engine started", BASE)
        self._gaps = self._histogram(
            "sampler_logprob_gap_nats", "The same gap, of all syncs whose gap is a number", _GAPS, BASE
        )
        self._busy = self._counter("trainer_busy_seconds", "Time in which the workers worked", BASE)
        self._waiting = self._counter(
            "trainer_waiting_seconds", "Time in which there was work and the workers did not", BASE
        )
        self.owners = OwnerMetrics(self._counter, owner_name)
        self.trained_meter, self.sampled_meter = TokenMeter(), TokenMeter()
        self.activity = ActivityLog(clock)
        self._kinds = self._gauge("requests_pending", "Requests accepted and not yet answered", "kind")
        for kind in RequestKind:
            self._kinds(kind)

    def text(self) -> bytes:
        """Return the exposition format; its content type is CONTENT_TYPE."""
        return generate_latest(self._registry)

    def watch(self, base_model: str, name: str, help_text: str, value: Callable[[], float]) -> None:
        """Register a gauge of one base model, whose value is read at each scrape."""
        if (gauge := self._watched.get(name)) is None:
            gauge = self._watched[name] = self._gauge(name, help_text, BASE)
        gauge(base_model).set_function(value)

    def occupancy(self, base_model: str) -> "Occupancy":
        """Return the occupancy of the trainer of a base model, which is counted from 0."""
        return Occupancy(self._busy(base_model), self._waiting(base_model))

    # Requests of the journal

    def arrived(self, rows: Iterable[QueuedRow]) -> None:
        """Count arrivals. A row may arrive twice, or have been counted by an earlier engine."""
        for row in rows:
            if row.status is FutureStatus.PENDING:
                if row.id not in self._pending:
                    self._kinds(row.kind).inc()
                self._pending[row.id] = row
            elif row.id > self._last_refused and row.created_at >= self._since:
                self._last_refused = row.id
                self.counted(row.kind, "user", row.owner_id)  # refused by the API

    def answered(self, future_id: int, outcome: OutcomeLabel) -> None:
        row = self._pending.pop(future_id, None)
        self._begun.discard(future_id)
        if row is not None:
            self._kinds(row.kind).dec()
            self.counted(row.kind, outcome, row.owner_id)
            self._latency(row.kind).observe(max(0.0, self._clock() - row.created_at))

    def pending(self) -> Iterator[QueuedRow]:
        """Iterate over the requests without a result, the oldest first."""
        return iter(self._pending.values())

    def counted(self, kind: str, outcome: OutcomeLabel, owner: OwnerId | None) -> None:
        """Count one request, of the journal or not."""
        self._requests(kind, outcome).inc()
        self.owners.answered(owner, kind)

    # Work

    def began(self, rows: Iterable[QueuedRow], at: float) -> None:
        """Record the start of work at a time of the clock. Repeated work counts from its first start."""
        for row in rows:
            if row.id in self._pending and row.id not in self._begun:
                self._begun.add(row.id)
                self.waited(row.kind, at - row.created_at)

    def waited(self, kind: str, seconds: float) -> None:
        self._waits(kind).observe(max(0.0, seconds))

    def unit(self, base_model: str, rows: Sequence[QueuedRow], began_at: float, worked_s: float) -> None:
        """Record a unit that has just ended, on which the trainer of a base model worked for `worked_s`."""
        kind = PASS if rows[0].kind in PASSES else rows[0].kind
        self._unit_seconds(base_model, kind).observe(worked_s)
        self.activity.unit(base_model, rows, began_at)

    def passed(
        self, base_model: str, rows: Sequence[QueuedRow], outputs: Sequence[PassOutput | Failure]
    ) -> None:
        """Count one pass of a trainer."""
        sizes = [
            sum(map(len, output.logprobs)) if isinstance(output, PassOutput) else 0 for output in outputs
        ]
        self._unit_rows(base_model).observe(len(rows))
        self._unit_tokens(base_model).observe(sum(sizes))
        self.trained_meter.add(sum(sizes))
        for row, size in zip(rows, sizes, strict=True):
            self._trained(base_model, row.kind).inc(size)
            self.owners.trained(row.owner_id, size)

    def sampled(self, base_model: str, count: int, owner: OwnerId | None) -> None:
        self._sampled(base_model).inc(count)
        self.sampled_meter.add(count)
        self.owners.sampled(owner, count)

    def synced(self, base_model: str, version: str, seconds: float, paused_s: float) -> None:
        """Count one sync of full parameters, which has just ended."""
        self._sync(base_model).observe(seconds)
        self._pause(base_model).observe(paused_s)
        self.activity.sync(base_model, version, seconds, paused_s)

    def published(
        self, base_model: str, weights: Literal["lora", "full"], future_id: int, seconds: float
    ) -> None:
        """Count weights that have been loaded by the samplers; `future_id`: of the save."""
        self._publish(base_model, weights).observe(seconds)
        self.activity.publish(weights, future_id, seconds)

    def compared(self, base_model: str, gap: float) -> None:
        self._gap(base_model).set(gap)
        if not math.isnan(gap):  # NaN would make the sum NaN for good
            self._gaps(base_model).observe(gap)
        if math.isnan(gap) or gap >= self._largest_gaps.get(base_model, 0.0):
            self._largest_gaps[base_model] = gap
            self._gap_max(base_model).set(gap)

    def _counter(self, name: str, help_text: str, *labels: str) -> Callable[..., Counter]:
        return cache(Counter(f"{_PREFIX}_{name}", help_text, labels, registry=self._registry).labels)

    def _gauge(self, name: str, help_text: str, *labels: str) -> Callable[..., Gauge]:
        return cache(Gauge(f"{_PREFIX}_{name}", help_text, labels, registry=self._registry).labels)

    def _histogram(
        self, name: str, help_text: str, buckets: Sequence[float], *labels: str
    ) -> Callable[..., Histogram]:
        made = Histogram(f"{_PREFIX}_{name}", help_text, labels, buckets=buckets, registry=self._registry)
        return cache(made.labels)


class Occupancy:
    """Splits the time with work into time in which the workers were busy and time in which they waited.

    busy / (busy + waiting) is the trainer's busy fraction; time without work counts as neither.
    """

    def __init__(self, busy: Counter, waiting: Counter) -> None:
        self._busy = busy
        self._waiting = waiting
        self._since: float | None = None

    def work_came(self) -> None:
        if self._since is None:
            self._since = time.monotonic()

    def no_work(self) -> None:
        self._since = None

    def unit_done(self, worked_s: float) -> None:
        """Count one unit, in which the workers were busy for `worked_s`."""
        now = time.monotonic()
        passed = now - (now if self._since is None else self._since)
        self._busy.inc(worked_s)
        self._waiting.inc(max(0.0, passed - worked_s))
        self._since = now

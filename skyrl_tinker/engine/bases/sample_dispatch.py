"""Samples of all base models, each at the driver of its own."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from skyrl_tinker.domain.ids import RequestKind, SessionId
from skyrl_tinker.domain.values import Failure, WeightVersion
from skyrl_tinker.engine.outbox import Outbox, json_answer
from skyrl_tinker.engine.sampler.sampler_driver import SamplerDriver
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.protocol.queue_views import SamplingView
from skyrl_tinker.store.futures.finish import FutureOutcome
from skyrl_tinker.store.futures.queue import QueuedRow

CANCELLED = Failure("this sample was cancelled by its client (cancel_future)", "user")
EMPTY: Mapping[int, FutureOutcome] = MappingProxyType({})


class SampleDispatch:
    def __init__(self, drivers: Sequence[SamplerDriver], outbox: Outbox, metrics: Metrics) -> None:
        """`drivers`: one for each base model that is sampled."""
        self.drivers = drivers
        self._outbox = outbox
        self._metrics = metrics
        self._of = {name: driver for driver in drivers for name in driver.facts.names}

    async def submit(self, rows: Sequence[QueuedRow]) -> None:
        """Queue samples. Those of a base model from before a restart, not served any more, fail."""
        by_base: dict[str | None, list[QueuedRow]] = {}
        for row in rows:
            by_base.setdefault(row.base_model, []).append(row)
        refused: dict[int, Failure] = {}
        for name, own in by_base.items():
            if name in self._of:
                self._of[name].submit(own)
            else:
                refused |= dict.fromkeys((row.id for row in own), self._not_served(name))
        await self._outbox.send(refused.items())

    def _not_served(self, name: str | None) -> Failure:
        sampled = ", ".join(driver.facts.name for driver in self.drivers) or "there is none"
        return Failure(
            f"this sampling client is of base model {name!r}, expected one that is sampled here: {sampled}",
            "user",
        )

    def queued(self) -> int:
        """Count the requests that wait for a free slot."""
        return sum(driver.queued() for driver in self.drivers)

    def views(self) -> dict[str, SamplingView]:
        """Return the queues by the name of their base model."""
        return {driver.facts.name: driver.view() for driver in self.drivers}

    async def cancel(self, rows: Sequence[QueuedRow]) -> None:
        """Cancel samples; each row's body is the future id of a sample that was submitted before it."""
        cancelled = {int(row.body or b""): CANCELLED for row in rows}
        await self.end(cancelled, {row.id: json_answer({}) for row in rows})

    async def end(self, failures: Mapping[int, Failure], also: Mapping[int, FutureOutcome] = EMPTY) -> None:
        """Fail these samples, by future id: samplers abort those in flight and never get the others.

        Finished samples stay as they are. The outcomes `also` are sent with these failures.
        """
        for driver in self.drivers:
            driver.drop(failures)
        await self._outbox.send([*failures.items(), *also.items()])

    async def end_sessions(self, reasons: Mapping[SessionId, str]) -> None:
        """Fail all samples of these finished sessions, with the given reasons."""
        rows = (row for row in self._metrics.pending() if row.kind is RequestKind.SAMPLE)
        over = [(row.id, row.session_id) for row in rows if row.session_id in reasons]
        if over:
            await self.end({future_id: _finished(session, reasons[session]) for future_id, session in over})

    def forget_sources(self, version: WeightVersion) -> None:
        """Look up the weights of the sampling sessions on this version again: it was dropped."""
        for driver in self.drivers:
            driver.forget_sources(version)


def _finished(session: SessionId, reason: str) -> Failure:
    return Failure(f"this sample was stopped: session {session} is finished ({reason})", "user")

"""Cached view of the engine's queues: read on demand and while samples wait, at most once a second.

Beside other API processes it is read each second, as samples may wait that those have accepted.
"""

import asyncio
import logging
import time

from pydantic import ValidationError

from skyrl_tinker.api.waiting.engine_client import EngineClient, EngineUnavailableError
from skyrl_tinker.protocol.queue_views import QueuesView, queues_from_bytes

EVERY_S = 1.0
PATIENCE_S = 2.0  # then a long poll is answered without a reason
_log = logging.getLogger(__name__)


class EngineQueues:
    """Reader of the queues, to `run` as a task; between two reads it counts the samples accepted here."""

    def __init__(self, engine: EngineClient, *, alone: bool) -> None:
        """`alone`: no other API process, on this host or another, accepts samples."""
        self._engine = engine
        self._alone = alone
        self._requested = asyncio.Event()
        self._refreshed = asyncio.Event()  # set and replaced at each read
        self._view: QueuesView | None = None
        self._read_at = 0.0
        self._accepted = 0
        self._waiting = 0  # samples, at the last read

    async def run(self) -> None:
        """Read on request until cancelled."""
        if not self._alone:
            self._requested.set()
        while True:
            await self._requested.wait()
            self._requested.clear()
            await self._refresh()
            self._refreshed.set()
            self._refreshed = asyncio.Event()
            await asyncio.sleep(EVERY_S)

    async def view(self) -> QueuesView | None:
        """Return the queues as of at most EVERY_S ago; None while the engine does not answer."""
        if time.monotonic() - self._read_at > EVERY_S:
            self._requested.set()
            try:
                await asyncio.wait_for(self._refreshed.wait(), PATIENCE_S)
            except TimeoutError:
                return None
        return self._view

    def sample_accepted(self) -> None:
        self._accepted += 1
        self._requested.set()

    def samples_waiting(self) -> int:
        """Estimate how many samples are accepted and not finished."""
        return self._waiting + self._accepted

    @property
    def samples_per_second(self) -> float | None:
        views = self._view.sampling.values() if self._view else ()
        return sum(view.per_second or 0.0 for view in views) or None

    async def _refresh(self) -> None:
        accepted = self._accepted
        try:
            self._view = queues_from_bytes(await self._engine.get("/queues"))
        except (EngineUnavailableError, ValidationError) as error:  # it is starting: the old count holds
            _log.debug("the engine's queues could not be read: %s", error)
            self._view = None
        else:
            self._waiting = sum(view.waiting + view.in_flight for view in self._view.sampling.values())
            self._accepted -= accepted
        self._read_at = time.monotonic()
        if (
            self.samples_waiting() or not self._alone
        ):  # read on until there are none, or a stale count refuses later samples
            self._requested.set()

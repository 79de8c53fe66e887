"""Cached view of the engine's queues: read on demand and while samples wait, at most once a second.

Samples above the backlog of their base model get a 429 by it, and clients try them again.

Beside other API processes it is read each second, as samples may wait that those have accepted.
"""

import asyncio
import logging
import math
import time
from collections import Counter

from pydantic import ValidationError

from skyrl_tinker.api.waiting.engine_client import EngineClient, EngineUnavailableError
from skyrl_tinker.errors import OverloadedError
from skyrl_tinker.protocol.queue_views import QueuesView, queues_from_bytes

EVERY_S = 1.0
LONGEST_S = 60
"""Longest time after which a client is told to try a sample again."""
PATIENCE_S = 2.0  # then a long poll is answered without a reason
_log = logging.getLogger(__name__)


class EngineQueues:
    """Reader of the queues, to `run` as a task; between two reads it counts the samples accepted here."""

    def __init__(self, engine: EngineClient, backlog: int, *, alone: bool) -> None:
        """`backlog`: of samples of a base model. `alone`: no other API process, on any host, accepts some."""
        self._engine = engine
        self._backlog = backlog
        self._alone = alone
        self._requested = asyncio.Event()
        self._refreshed = asyncio.Event()  # set and replaced at each read
        self._view: QueuesView | None = None
        self._read_at = 0.0
        self._accepted: Counter[str] = Counter()  # samples, by base model
        self._waiting: dict[str, int] = {}  # likewise, at the last read

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

    def accepted(self, base_model: str) -> None:
        """Count one more waiting sample."""
        self._accepted[base_model] += 1
        self._requested.set()

    def samples_waiting(self, base_model: str) -> int:
        """Estimate how many samples of a base model are accepted and not finished."""
        return self._waiting.get(base_model, 0) + self._accepted[base_model]

    def full(self, base_model: str) -> OverloadedError | None:
        """Return the refusal of one more sample of a base model, None while there is room."""
        waiting = self.samples_waiting(base_model)
        if waiting < self._backlog:
            return None
        return OverloadedError(
            f"{waiting} samples of {base_model} are waiting, and the server accepts {self._backlog} "
            "(setting sample_backlog): send this request again later",
            self._retry_after(base_model, waiting),
        )

    def _retry_after(self, base_model: str, waiting: int) -> int:
        """Estimate the seconds until the backlog is short enough; 1 while the throughput is unknown."""
        view = self._view and self._view.sampling.get(base_model)
        rate = view.per_second if view else None
        return min(LONGEST_S, max(1, math.ceil((waiting - self._backlog) / rate))) if rate else 1

    async def _refresh(self) -> None:
        accepted = self._accepted.copy()
        try:
            self._view = queues_from_bytes(await self._engine.ask("/queues"))
        except (EngineUnavailableError, ValidationError) as error:  # it is starting: the old count holds
            _log.debug("the engine's queues could not be read: %s", error)
            self._view = None
        else:
            views = self._view.sampling.items()
            self._waiting = {name: view.waiting + view.in_flight for name, view in views}
            self._accepted -= accepted
        self._read_at = time.monotonic()
        if any(self._waiting.values()) or self._accepted.total() or not self._alone:
            self._requested.set()  # until there are none, or a stale count refuses later samples

"""Long polls: one task per process learns which futures finished and wakes those who wait for them."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import OperationalError

from skyrl_tinker.store import futures as future_rows
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.futures import Outcome
from skyrl_tinker.store.store import Store
from skyrl_tinker.wire.ids import FutureStatus, RequestId

_FALLBACK_POLL_S = 1.0
_log = logging.getLogger(__name__)


class FutureWaiter:
    """Waits for futures to finish: `start` before the first wait, `run` as a task, `stop` ends all waits."""

    def __init__(self, store: Store, bell: Doorbell) -> None:
        self._store = store
        self._bell = bell
        self._cursor = 0  # results.id: everything up to here has been announced
        self._waiting: dict[RequestId, set[asyncio.Event]] = {}
        self._stopped = False

    async def start(self) -> None:
        async with self._store.read() as conn:
            self._cursor = await future_rows.last_result_id(conn)

    async def run(self) -> None:
        """Wake waiters on each ring, and each second in case a ring was lost. Ends by cancellation."""
        while True:
            await self._bell.wait(_FALLBACK_POLL_S)
            try:
                await self.announce()
            except OperationalError as error:
                # A busy or briefly unreadable database costs one round: the cursor has not moved.
                _log.warning("finished futures could not be read, trying again: %s", error)

    async def announce(self) -> None:
        """Wake everybody whose future finished since the last call."""
        async with self._store.read() as conn:
            finished = await future_rows.finished_after(conn, self._cursor)
        for cursor, request_id in finished:
            self._cursor = max(self._cursor, cursor)
            for event in self._waiting.get(request_id, ()):
                event.set()

    def stop(self) -> None:
        """End every wait now, and those to come at once: the process is shutting down."""
        self._stopped = True
        for events in self._waiting.values():
            for event in events:
                event.set()

    @property
    def waiting(self) -> int:
        """How many long polls are held."""
        return sum(len(events) for events in self._waiting.values())

    async def wait(self, request_id: RequestId, timeout_s: float) -> Outcome | None:
        """The outcome, still pending after `timeout_s` seconds or at shutdown; None for an unknown id."""
        with self._registered(request_id) as finished:
            outcome = await self._read(request_id)  # after registering, so that no finish falls between
            if outcome is None or outcome.status is not FutureStatus.PENDING or self._stopped:
                return outcome
            try:
                await asyncio.wait_for(finished.wait(), timeout_s)
            except TimeoutError:
                return outcome
        return outcome if self._stopped else await self._read(request_id)

    @contextmanager
    def _registered(self, request_id: RequestId) -> Iterator[asyncio.Event]:
        event = asyncio.Event()
        self._waiting.setdefault(request_id, set()).add(event)
        try:
            yield event
        finally:
            self._waiting[request_id].discard(event)
            if not self._waiting[request_id]:
                del self._waiting[request_id]

    async def _read(self, request_id: RequestId) -> Outcome | None:
        async with self._store.read() as conn:
            return await future_rows.outcome(conn, request_id)

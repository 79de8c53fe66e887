"""Long polls: one task per process learns which futures finished and answers those who wait for them."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sqlalchemy.exc import OperationalError

from skyrl_tinker.domain.ids import FutureStatus, OwnerId, RequestId
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.futures import outcomes
from skyrl_tinker.store.futures.outcomes import Outcome
from skyrl_tinker.store.store import Store

_FALLBACK_POLL_S = 1.0
_SMALL_BYTES = 1 << 20
_REMEMBERED = 4096
_log = logging.getLogger(__name__)

_Wait = asyncio.Future[Outcome | None]  # None: the time is over, or the process shuts down


class FutureWaiter:
    """Waits for futures to finish: `start` before the first wait, `run` as a task, `stop` ends all waits."""

    def __init__(self, store: Store, bell: Doorbell) -> None:
        self._store = store
        self._bell = bell
        self._cursor = 0  # results.id: everything up to here has been announced
        self._waiting: dict[RequestId, set[_Wait]] = {}
        self._expected: dict[RequestId, OwnerId | None] = {}
        self._announced: dict[RequestId, None] = {}  # the last ones, oldest first
        self.news = asyncio.Event()  # set, and replaced, when anything finished
        self._stopped = False

    async def start(self) -> None:
        with self._store.read() as conn:
            self._cursor = outcomes.last_result_id(conn)

    async def run(self) -> None:
        """Answer waits on each ring, and each second in case a ring was lost. Ends by cancellation."""
        while True:
            await self._bell.wait(_FALLBACK_POLL_S)
            try:
                await self.announce()
            except OperationalError as error:
                # A busy or briefly unreadable database costs one round: the cursor has not moved.
                _log.warning("finished futures could not be read, trying again: %s", error)

    def expect(self, request_id: RequestId, owner: OwnerId | None) -> None:
        """This process has just written it: until its result is announced, a wait need not ask the store.

        Its result may have been announced before the writer's thread could tell us.
        """
        if request_id not in self._announced:
            self._expected[request_id] = owner

    async def announce(self) -> None:
        """Answer everybody whose future finished since the last call; one query reads all their results."""
        with self._store.read() as conn:
            finished = outcomes.finished_after(conn, self._cursor, _SMALL_BYTES)
        for cursor, outcome in finished:
            self._remember(outcome.request_id)
            if outcome.request_id in self._waiting:
                whole = await self._whole(outcome)
                for wait in self._waiting.get(outcome.request_id, ()):
                    _answer(wait, whole)
            self._cursor = cursor
        if finished:
            self._tell_news()

    def _remember(self, request_id: RequestId) -> None:
        self._expected.pop(request_id, None)
        self._announced[request_id] = None
        if len(self._announced) > _REMEMBERED:
            del self._announced[next(iter(self._announced))]

    async def announced(self, news: asyncio.Event, timeout_s: float) -> bool:
        """Whether `news`, as it was taken before looking, came in time; False at once at shutdown."""
        with suppress(TimeoutError):
            await asyncio.wait_for(news.wait(), 0 if self._stopped else timeout_s)
            return not self._stopped
        return False

    def _tell_news(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    def stop(self) -> None:
        """End every wait now, and those to come at once: the process is shutting down."""
        self._stopped = True
        self._tell_news()
        for waits in self._waiting.values():
            for wait in waits:
                _answer(wait, None)

    @property
    def stopped(self) -> bool:
        return self._stopped

    @property
    def waiting(self) -> int:
        """How many long polls are held."""
        return sum(len(waits) for waits in self._waiting.values())

    async def wait(self, request_id: RequestId, owner: OwnerId | None, timeout_s: float) -> Outcome | None:
        """The outcome, still pending after `timeout_s` seconds or at shutdown; None for an id that this owner
        was never given."""
        with self._registered(request_id) as finished:
            if request_id not in self._expected:  # asked after registering, so that no finish falls between
                outcome = await self._look(request_id, owner)
                if outcome is None or outcome.status is not FutureStatus.PENDING:
                    return outcome
            elif self._expected[request_id] != owner:
                return None
            return await self._until(finished, timeout_s) or await self._look(request_id, owner)

    async def _until(self, finished: _Wait, timeout_s: float) -> Outcome | None:
        """None when the time is over or the process shuts down."""
        if self._stopped:
            return None
        ending = asyncio.get_running_loop().call_later(timeout_s, _answer, finished, None)
        try:
            return await finished
        finally:
            ending.cancel()

    @contextmanager
    def _registered(self, request_id: RequestId) -> Iterator[_Wait]:
        wait: _Wait = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(request_id, set()).add(wait)
        try:
            yield wait
        finally:
            self._waiting[request_id].discard(wait)
            if not self._waiting[request_id]:
                del self._waiting[request_id]

    async def _look(self, request_id: RequestId, owner: OwnerId | None) -> Outcome | None:
        with self._store.read() as conn:
            outcome = outcomes.find(conn, request_id, _SMALL_BYTES)
        if outcome is None or outcome.owner_id != owner:
            return None
        if outcome.status is not FutureStatus.PENDING:  # announced longer ago than is remembered
            self._expected.pop(request_id, None)
        return await self._whole(outcome)

    async def _whole(self, outcome: Outcome) -> Outcome:
        """With its result, also where that is large: then it is read off the loop."""
        if not outcome.withheld:
            return outcome
        found = await self._store.fetch(lambda conn: outcomes.find(conn, outcome.request_id))
        return found or outcome


def _answer(wait: _Wait, outcome: Outcome | None) -> None:
    if not wait.done():
        wait.set_result(outcome)

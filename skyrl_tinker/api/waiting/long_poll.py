"""Long polls: one task per process reads which futures finished and wakes the requests that wait for them."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TypeVar

from sqlalchemy.exc import OperationalError

from skyrl_tinker.domain.ids import FutureStatus, OwnerId, Reach, RequestId, SamplingSessionId
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.futures import outcomes
from skyrl_tinker.store.futures.outcomes import Outcome
from skyrl_tinker.store.owners import reaches
from skyrl_tinker.store.store import Store

_FALLBACK_POLL_S = 1.0
_SMALL_BYTES = 1 << 15  # of a result that is read on the loop
_BESIDE_BYTES = 4096  # of one that is read with its announcement, though nobody may wait for it here
_PAGE = 64  # results read at once
_REMEMBERED = 4096
_log = logging.getLogger(__name__)

K = TypeVar("K")
V = TypeVar("V")
_Wait = asyncio.Future[Outcome | None]  # None: timed out, or the process shuts down


class FutureWaiter:
    """Waiter for futures: `start` before the first wait, `run` as a task, `stop` to end all waits."""

    def __init__(self, store: Store, bell: Doorbell) -> None:
        self._store = store
        self._bell = bell
        self._cursor = 0  # results.id: everything up to here has been announced
        self._waiting: dict[RequestId, set[_Wait]] = {}
        self._expected: dict[RequestId, OwnerId | None] = {}
        self._announced: dict[RequestId, None] = {}  # the last ones, oldest first
        self._news: dict[SamplingSessionId, set[asyncio.Event]] = {}
        self._stopped = False

    async def start(self) -> None:
        self._cursor = await self._store.read(outcomes.last_result_id)

    async def run(self) -> None:
        """Answer waits on each ring, and each second in case a ring was lost, until cancelled."""
        while True:
            await self._bell.wait(_FALLBACK_POLL_S)
            try:
                await self.announce()
            except OperationalError as error:
                # A busy or briefly unreadable database costs one round: the cursor has not moved.
                _log.warning("finished futures could not be read, trying again: %s", error)

    def expect(self, request_id: RequestId, owner: OwnerId | None) -> None:
        """Note a future that this process has just written: a wait for it need not ask the store first.

        Its result may have been announced before the writer's thread returned.
        """
        if request_id not in self._announced:
            self._expected[request_id] = owner

    async def announce(self) -> None:
        """Answer the waits whose futures finished since the last call; one query reads a page of results."""
        more = True
        while more:
            more = await self._announce_page()
            await asyncio.sleep(0)  # others run between pages

    async def _announce_page(self) -> bool:
        """Return True if there may be more."""
        finished = await self._store.read(
            lambda conn: outcomes.finished_after(conn, self._cursor, _BESIDE_BYTES, _PAGE)
        )
        for cursor, outcome in finished:
            self._remember(outcome.request_id)
            if outcome.request_id in self._waiting:
                complete = await self._complete(outcome)
                for wait in self._waiting.get(outcome.request_id, ()):
                    _answer(wait, complete)
            self._cursor = cursor
            self._tell(outcome.sampling_session_id)
        return len(finished) == _PAGE

    def _remember(self, request_id: RequestId) -> None:
        self._expected.pop(request_id, None)
        self._announced[request_id] = None
        if len(self._announced) > _REMEMBERED:
            del self._announced[next(iter(self._announced))]

    def news_of(self, session_id: SamplingSessionId) -> AbstractContextManager[asyncio.Event]:
        """Have an event set each time that samples of this session finish: others' wake nobody."""
        return _listed(self._news, session_id, asyncio.Event())

    async def wait_for_news(self, news: asyncio.Event, timeout_s: float) -> bool:
        """Return True once `news`, cleared before reading, is set; False on timeout, at once at shutdown."""
        with suppress(TimeoutError):
            await asyncio.wait_for(news.wait(), 0 if self._stopped else timeout_s)
            return not self._stopped
        return False

    def _tell(self, session_id: SamplingSessionId | None) -> None:
        for news in self._news.get(session_id, ()) if session_id is not None else ():
            news.set()

    def stop(self) -> None:
        """End every wait, and future ones immediately: the process is shutting down."""
        self._stopped = True
        for session_id in self._news:
            self._tell(session_id)
        for waits in self._waiting.values():
            for wait in waits:
                _answer(wait, None)

    @property
    def stopped(self) -> bool:
        return self._stopped

    @property
    def waiting(self) -> int:
        """Number of long polls held."""
        return sum(len(waits) for waits in self._waiting.values())

    async def wait(self, request_id: RequestId, reach: Reach, timeout_s: float) -> Outcome | None:
        """Return the outcome, pending on timeout or shutdown; None for an id that the caller does not see."""
        future: _Wait = asyncio.get_running_loop().create_future()
        with _listed(self._waiting, request_id, future) as wait:
            if not self._expects(request_id, reach):  # read after it is listed, so that no finish is missed
                outcome = await self._read(request_id, reach)
                if outcome is None or outcome.status is not FutureStatus.PENDING:
                    return outcome
            return await self._await(wait, timeout_s) or await self._read(request_id, reach)

    def _expects(self, request_id: RequestId, reach: Reach) -> bool:
        """Return whether this future is known to be pending and the caller's: adoption may have moved it."""
        return request_id in self._expected and reaches(reach, self._expected[request_id])

    async def _await(self, wait: _Wait, timeout_s: float) -> Outcome | None:
        """Return None on timeout or shutdown."""
        if self._stopped:
            return None
        timer = asyncio.get_running_loop().call_later(timeout_s, _answer, wait, None)
        try:
            return await wait
        finally:
            timer.cancel()

    async def _read(self, request_id: RequestId, reach: Reach) -> Outcome | None:
        outcome = await self._find(request_id)
        if outcome is None or not reaches(reach, outcome.owner_id):
            return None
        if outcome.status is not FutureStatus.PENDING:  # its announcement is no longer remembered
            self._expected.pop(request_id, None)
        return outcome

    async def _complete(self, announced: Outcome) -> Outcome:
        """Return the outcome with its result, which may have been too long to be announced."""
        return (announced.withheld and await self._find(announced.request_id)) or announced

    async def _find(self, request_id: RequestId) -> Outcome | None:
        """Return the outcome with its result; a large one is read off the loop."""
        outcome = await self._store.read(lambda conn: outcomes.find(conn, request_id, _SMALL_BYTES))
        if outcome is None or not outcome.withheld:
            return outcome
        return await self._store.fetch(lambda conn: outcomes.find(conn, request_id)) or outcome


@contextmanager
def _listed(table: dict[K, set[V]], key: K, entry: V) -> Iterator[V]:
    """Have an entry stand under a key, which goes with its last one."""
    table.setdefault(key, set()).add(entry)
    try:
        yield entry
    finally:
        table[key].discard(entry)
        if not table[key]:
            del table[key]


def _answer(wait: _Wait, outcome: Outcome | None) -> None:
    if not wait.done():
        wait.set_result(outcome)

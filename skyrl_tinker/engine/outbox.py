"""Results that leave the engine: encoded once, committed together, then announced to the API."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ParamSpec

import orjson
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from skyrl_tinker.domain.values import Failure
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.errors import DiskFullError, SkyrlTinkerError, StatementError, StorageAwayError, cut
from skyrl_tinker.redaction import redact, without_paths
from skyrl_tinker.store.database.abstract_database import is_of_statement
from skyrl_tinker.store.database.group_commit import Op, T
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.futures import finish
from skyrl_tinker.store.futures.finish import (
    JSON_TYPE,
    NOTHING_RAN,
    FutureOutcome,
    FutureResult,
    Ran,
    finish_all,
)
from skyrl_tinker.store.store import Store

RETRY_S, AWAY_S = 1.0, 5.0
STATEMENT_TRIES = 3
P = ParamSpec("P")
_log = logging.getLogger(__name__)


def json_answer(value: Mapping[str, Any]) -> FutureResult:
    """Encode a result as JSON. Its numbers must be finite: JSON has no NaN."""
    return FutureResult(JSON_TYPE, orjson.dumps(value))


def failure_of(error: Exception) -> Failure:
    """Return the failure that a client gets for this error, without paths and secrets.

    Unexpected errors are logged, and so are those that name a path.
    """
    if isinstance(error, SkyrlTinkerError):
        message = without_paths(str(error))
        if message != str(error):
            _log.warning("a request failed: %s", error)
        return Failure(message, error.category)
    _log.error("a request failed unexpectedly", exc_info=error)
    return Failure(without_paths(redact(f"{type(error).__name__}: {error}")), "server")


class Outbox:
    def __init__(self, store: Store, bell: Doorbell, metrics: Metrics) -> None:
        self._store = store
        self._bell = bell
        self._metrics = metrics
        self._waiting: dict[int, FutureOutcome] = {}  # by future id
        self._sending: asyncio.Task[None] | None = None

    def note_answered(self, future_ids: Iterable[int]) -> None:
        """Count futures that an op has completed without error."""
        for future_id in future_ids:
            self._metrics.answered(future_id, "ok")

    async def send(
        self,
        outcomes: Iterable[tuple[int, FutureOutcome]],
        *also: Op[Any],
        replayed: Collection[int] = (),
        ran: Mapping[int, Ran] = NOTHING_RAN,
    ) -> None:
        """Finish futures (by id), in one commit with the ops `also`; keep the bodies of those in `replayed`.

        `ran`: recorded for the futures that ran. Waits while the database fails. A call with outcomes alone
        shares a commit with concurrent ones; if the commit is refused, each is tried separately.
        """
        finished = dict(outcomes)
        if also or replayed or ran:
            await persistently(self._send, finished, also, replayed, ran)
        elif finished:
            self._waiting |= finished
            if self._sending is None:
                self._sending = asyncio.create_task(self._send_waiting())
            try:
                await asyncio.shield(self._sending)
            except Exception:  # perhaps another call's fault: tried alone, each raises its own
                await persistently(self._send, finished, ())

    async def _send_waiting(self) -> None:
        """Commit the outcomes of one iteration of the event loop together: many samples end at once."""
        self._sending, finished, self._waiting = None, self._waiting, {}
        await persistently(self._send, finished, ())

    async def _send(
        self,
        finished: Mapping[int, FutureOutcome],
        also: Sequence[Op[Any]],
        replayed: Collection[int] = (),
        ran: Mapping[int, Ran] = NOTHING_RAN,
    ) -> None:
        def op(conn: Connection) -> None:
            for future_id in ran.keys() - finished.keys():  # first, as an op may read these records
                finish.record(conn, future_id, ran[future_id])
            for effect in also:
                effect(conn)
            finish_all(conn, finished, replayed, ran)

        size = sum(len(outcome.body) for outcome in finished.values() if isinstance(outcome, FutureResult))
        await self._store.write(op, partial(self._bell.ring, "api"), size)
        for future_id, outcome in finished.items():
            self._metrics.answered(future_id, outcome.category if isinstance(outcome, Failure) else "ok")


async def persistently(work: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Retry while the database fails, so that a failure delays requests but neither loses nor ends any.

    Raises StatementError if the database fails the statement each time.
    """
    failed = 0
    while True:
        try:
            return await work(*args, **kwargs)
        except OperationalError as error:
            failed += is_of_statement(error)
            if failed == STATEMENT_TRIES:
                cause = f"the database has failed a statement {failed} times ({error.orig})"
                raise StatementError(cut(f"{cause}: {error.statement}")) from error
            _log.warning("the store failed, trying again in %.0f s: %s", RETRY_S, error)
            await asyncio.sleep(RETRY_S)


async def when_possible(work: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Retry while a disk is full or storage is away: acknowledged work waits. Raises all other errors."""
    while True:
        try:
            return await work(*args, **kwargs)
        except (DiskFullError, StorageAwayError) as error:
            pause_s = RETRY_S if isinstance(error, DiskFullError) else AWAY_S
            _log.warning("tried again in %.0f s: %s", pause_s, error)
            await asyncio.sleep(pause_s)

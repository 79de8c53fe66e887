"""How results leave the engine: encoded once, committed together, then the API is rung."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from skyrl_tinker.domain.values import Failure, Usage
from skyrl_tinker.engine.engine_metrics import Metrics
from skyrl_tinker.errors import SkyrlTinkerError
from skyrl_tinker.store import stability_records
from skyrl_tinker.store.database.group_commit import Op, T
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.futures import finish
from skyrl_tinker.store.futures.finish import NO_USAGE
from skyrl_tinker.store.stability_records import SequenceRecord
from skyrl_tinker.store.store import Store

JSON_TYPE = "application/json"
RETRY_S = 1.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FutureResult:
    """A result as its bytes go to the client. `records`: kept of the sequences in it; `usage`: its tokens."""

    content_type: str
    body: bytes
    records: tuple[SequenceRecord, ...] = ()
    usage: Usage = NO_USAGE


Outcome = FutureResult | Failure


def json_answer(value: Mapping[str, Any]) -> FutureResult:
    """Values are finite: JSON has no NaN."""
    return FutureResult(JSON_TYPE, orjson.dumps(value))


def failure_of(error: Exception) -> Failure:
    """What the client reads when carrying out its request raised this. What nobody foresaw is logged."""
    if isinstance(error, SkyrlTinkerError):
        return Failure(str(error), error.category)
    _log.error("a request failed unexpectedly", exc_info=error)
    return Failure(f"{type(error).__name__}: {error}", "server")


class Outbox:
    def __init__(self, store: Store, bell: Doorbell, metrics: Metrics | None = None) -> None:
        self._store = store
        self._bell = bell
        self._metrics = metrics or Metrics()
        self._waiting: dict[int, Outcome] = {}  # by future id
        self._sending: asyncio.Task[None] | None = None

    async def commit(self, op: Op[T], *done: int) -> T:
        """Commit an op that finishes these futures well, then ring the API."""
        value = await self._store.write(op, partial(self._bell.ring, "api"))
        for future_id in done:
            self._metrics.answered(future_id, "ok")
        return value

    async def send(self, outcomes: Iterable[tuple[int, Outcome]], *also: Op[Any]) -> None:
        """Finish futures (by id), together with what must stand or fall with them.

        They wait for a database that fails for a while.
        """
        finished = dict(outcomes)
        if also:
            await persistently(lambda: self._send(finished, also))
        elif finished:
            self._waiting |= finished
            if self._sending is None:
                self._sending = asyncio.create_task(self._send_waiting())
            await asyncio.shield(self._sending)

    async def _send_waiting(self) -> None:
        """What finishes in the same turn of the loop goes together: samples end many at once."""
        await asyncio.sleep(0)
        self._sending, finished, self._waiting = None, self._waiting, {}
        await persistently(lambda: self._send(finished, ()))

    async def _send(self, finished: Mapping[int, Outcome], also: Sequence[Op[Any]]) -> None:
        def op(conn: Connection) -> None:
            for each in also:
                each(conn)
            finish_all(conn, finished)

        await self.commit(op)
        for future_id, outcome in finished.items():
            self._metrics.answered(future_id, outcome.category if isinstance(outcome, Failure) else "ok")


async def persistently(op: Callable[[], Awaitable[T]]) -> T:
    """A database that fails for a while delays; it must neither lose a request nor end those of others."""
    while True:
        try:
            return await op()
        except OperationalError as error:
            _log.warning("the store failed, trying again in %.0f s: %s", RETRY_S, error)
            await asyncio.sleep(RETRY_S)


def finish_all(conn: Connection, outcomes: Mapping[int, Outcome]) -> None:
    """By future id."""
    answers: dict[int, FutureResult] = {}
    for future_id, outcome in outcomes.items():
        if isinstance(outcome, Failure):
            finish.fail(conn, future_id, outcome)
        else:
            answers[future_id] = outcome
    if answers:
        _succeed(conn, answers)


def _succeed(conn: Connection, answers: Mapping[int, FutureResult]) -> None:
    results = {
        future_id: (answer.content_type, answer.body, answer.usage) for future_id, answer in answers.items()
    }
    ended = finish.succeed_all(conn, results)
    records = {future_id: answers[future_id].records for future_id in ended if answers[future_id].records}
    if records:
        stability_records.add(conn, records)

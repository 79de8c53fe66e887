"""How results leave the engine: encoded once, committed together, then the API is rung."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from sqlalchemy.ext.asyncio import AsyncConnection

from skyrl_tinker.errors import SkyrlTinkerError
from skyrl_tinker.store import futures
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.store import Store
from skyrl_tinker.store.writer import Op, T
from skyrl_tinker.wire.values import Failure

JSON_TYPE = "application/json"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """A result as its bytes go to the client."""

    content_type: str
    body: bytes


Outcome = Answer | Failure


def json_answer(value: Mapping[str, Any]) -> Answer:
    """Values are finite: JSON has no NaN."""
    return Answer(JSON_TYPE, orjson.dumps(value))


def failure_of(error: Exception) -> Failure:
    """What the client reads when carrying out its request raised this. What nobody foresaw is logged."""
    if isinstance(error, SkyrlTinkerError):
        return Failure(str(error), error.category)
    _log.error("a request failed unexpectedly", exc_info=error)
    return Failure(f"{type(error).__name__}: {error}", "server")


class Outbox:
    def __init__(self, store: Store, bell: Doorbell) -> None:
        self._store = store
        self._bell = bell

    async def commit(self, op: Op[T]) -> T:
        """Commit an op that finishes futures, then ring the API."""
        value = await self._store.write(op)
        self._bell.ring("api")
        return value

    async def send(self, outcomes: Iterable[tuple[int, Outcome]], *also: Op[Any]) -> None:
        """Finish futures (by id), together with what must stand or fall with them."""
        finished = list(outcomes)

        async def op(conn: AsyncConnection) -> None:
            for each in also:
                await each(conn)
            for future_id, outcome in finished:
                await finish(conn, future_id, outcome)

        if finished or also:
            await self.commit(op)


async def finish(conn: AsyncConnection, future_id: int, outcome: Outcome) -> None:
    if isinstance(outcome, Failure):
        await futures.fail(conn, future_id, outcome)
    else:
        await futures.succeed(conn, future_id, outcome.content_type, outcome.body)

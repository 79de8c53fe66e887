"""Sampling: many requests in flight, none of which ever waits for training."""

import asyncio
from collections import deque
from collections.abc import Sequence

from sqlalchemy.ext.asyncio import AsyncConnection

from skyrl_tinker.engine.answers import Answer, Outbox, Outcome, failure_of
from skyrl_tinker.engine.samplers import Samplers
from skyrl_tinker.errors import NotFoundError
from skyrl_tinker.store import futures, sampling
from skyrl_tinker.store.futures import QueuedRow
from skyrl_tinker.store.store import Store
from skyrl_tinker.wire import codec
from skyrl_tinker.wire.ids import SamplingSessionId
from skyrl_tinker.wire.sample_codec import sample_from_body
from skyrl_tinker.wire.values import WeightVersion

BATCH = 256  # bodies read at once
CACHED_SESSIONS = 4096


class SamplerDriver:
    def __init__(self, store: Store, samplers: Samplers, outbox: Outbox, concurrency: int) -> None:
        """`concurrency`: most requests in flight; the bodies of others stay in the store."""
        self._store = store
        self._samplers = samplers
        self._outbox = outbox
        self._slots = asyncio.Semaphore(concurrency)
        self._queued: deque[QueuedRow] = deque()
        self._arrived = asyncio.Event()
        self._targets: dict[SamplingSessionId, WeightVersion | None] = {}

    def submit(self, rows: Sequence[QueuedRow]) -> None:
        self._queued.extend(rows)
        self._arrived.set()

    def forget_targets(self) -> None:
        """Versions were dropped: look them up anew."""
        self._targets.clear()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                batch = await self._next()
                async with self._store.read() as conn:
                    bodies = await futures.bodies(conn, [row.id for row in batch])
                for row in batch:
                    tasks.create_task(self._finish(row, bodies[row.id]))

    async def _next(self) -> list[QueuedRow]:
        """At least one row, and as many more as there are rows and free slots; each takes a slot."""
        while not self._queued:
            self._arrived.clear()
            await self._arrived.wait()
        await self._slots.acquire()
        batch = [self._queued.popleft()]
        while self._queued and len(batch) < BATCH and not self._slots.locked():
            await self._slots.acquire()
            batch.append(self._queued.popleft())
        return batch

    async def _finish(self, row: QueuedRow, body: bytes) -> None:
        try:
            await self._outbox.send([(row.id, await self._outcome(row, body))])
        finally:
            self._slots.release()

    async def _outcome(self, row: QueuedRow, body: bytes) -> Outcome:
        try:
            assert row.sampling_session_id is not None
            version = await self._target(row.sampling_session_id)
            output = await self._samplers.sample(version, sample_from_body(body))
            return Answer(codec.PROTOBUF, codec.encode_sample_response(output))
        except Exception as error:  # becomes the result of this request
            return failure_of(error)

    async def _target(self, session: SamplingSessionId) -> WeightVersion | None:
        """What this sampling client is pinned to. NotFoundError once its session is over."""
        if session not in self._targets:
            if len(self._targets) >= CACHED_SESSIONS:
                self._targets.clear()
            async with self._store.read() as conn:
                base_model, version = await _target(conn, session)
            self._samplers.require_served(base_model)
            self._targets[session] = version
        return self._targets[session]


async def _target(conn: AsyncConnection, session: SamplingSessionId) -> tuple[str, WeightVersion | None]:
    """Base model and version."""
    row = await sampling.get(conn, session)
    if row is None:
        raise NotFoundError(f"no sampling session {session}")
    if row.version_id is None:
        return row.base_model, None
    version = await sampling.version(conn, row.version_id)
    if version is None:
        raise NotFoundError(f"the weights of sampling session {session} are gone: its session is finished")
    return row.base_model, version

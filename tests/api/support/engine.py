"""The least engine that keeps the SDK going: it answers every request in the store as soon as it is rung."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from skyrl_tinker.domain.ids import FutureStatus, RequestKind
from skyrl_tinker.protocol.protobuf import pass_requests
from skyrl_tinker.protocol.stored_requests import sample_from_body
from skyrl_tinker.store import model_records, sampling_sessions
from skyrl_tinker.store.doorbell import Doorbell, SocketBell
from skyrl_tinker.store.futures import finish, queue
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.store import Store
from tests.api.support.world import pass_output, sample_output
from tests.support.reads import reading

PROTOBUF = "application/x-protobuf"
JSON = "application/json"


class Engine:
    """`order` is what it ran, as (kind, seq_id), in the order of arrival."""

    def __init__(self, store: Store, bell: Doorbell) -> None:
        self._store = store
        self._bell = bell
        self.order: list[tuple[RequestKind, int | None]] = []

    async def run(self) -> None:
        cursor = 0
        while True:
            with reading(self._store) as conn:
                rows = queue.queued_after(conn, cursor)
            for row in rows:
                cursor = row.id
                await self._answer(row)
            await self._bell.wait(0.2)

    async def _answer(self, row: QueuedRow) -> None:
        self.order.append((row.kind, row.seq_id))
        if row.status is FutureStatus.FAILED:
            return
        with reading(self._store) as conn:
            body = queue.read_bodies(conn, [row.id])[row.id]
        content_type, result = await self._result(row, body)
        await self._store.write(lambda conn: finish.succeed(conn, row.id, content_type, result))
        self._bell.ring("api")

    async def _result(self, row: QueuedRow, body: bytes) -> tuple[str, bytes]:
        if row.kind in (RequestKind.FORWARD, RequestKind.FORWARD_BACKWARD):
            data = pass_requests.from_canonical(body).data
            return PROTOBUF, pass_output(*([float(datum.tokens[0])] * len(datum.tokens) for datum in data))
        if row.kind is RequestKind.SAMPLE:
            request = sample_from_body(body)
            return PROTOBUF, sample_output(*([[7, 8]] * request.num_samples))
        if row.kind is RequestKind.SAVE_WEIGHTS_FOR_SAMPLER:
            return JSON, await self._sampling_session(row, json.loads(body)["sampling_session_seq_id"])
        if row.kind is RequestKind.CREATE_MODEL:
            return JSON, json.dumps({"model_id": (await self._model(row)).model_id}).encode()
        return JSON, json.dumps({"metrics": {"grad_norm": 1.0}}).encode()

    async def _model(self, row: QueuedRow) -> ModelRow:
        assert row.model_key is not None
        with reading(self._store) as conn:
            return model_records.by_key(conn, row.model_key)

    async def _sampling_session(self, row: QueuedRow, number: int) -> bytes:
        model = await self._model(row)
        made = await self._store.write(
            lambda conn: sampling_sessions.create(
                conn, model.session_id, number, base_model=model.base_model, model_path=None, version_id=None
            )
        )
        return json.dumps({"sampling_session_id": made}).encode()


@asynccontextmanager
async def working(store: Store, home: Path) -> AsyncIterator[Engine]:
    bell = SocketBell.bind(home, "engine")
    engine = Engine(store, bell)
    task = asyncio.create_task(engine.run())
    try:
        yield engine
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        bell.close()

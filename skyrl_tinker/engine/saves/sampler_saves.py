"""Saves for the samplers: of several models in one turn of the trainer; what follows needs no trainer."""

import asyncio
from collections.abc import Sequence

from sqlalchemy import Connection

from skyrl_tinker.domain.values import Failure
from skyrl_tinker.engine.outbox import Outbox
from skyrl_tinker.engine.parity.drift_monitor import DriftMonitor, ScoredProbe
from skyrl_tinker.engine.saves.sampler_publisher import Capture, Publisher, Save
from skyrl_tinker.engine.scheduling.lanes import model_of
from skyrl_tinker.protocol.stored_requests import SaveSamplerBody
from skyrl_tinker.store import model_records
from skyrl_tinker.store.futures import queue
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.store import Store


class Syncs:
    def __init__(self, store: Store, publisher: Publisher, gaps: DriftMonitor, outbox: Outbox) -> None:
        self._store = store
        self._publisher = publisher
        self._gaps = gaps
        self._outbox = outbox

    async def run(self, rows: Sequence[QueuedRow], background: asyncio.TaskGroup) -> None:
        """The trainer's turn; who publishes and compares goes on in `background`. TrainerError."""
        saves = await self._saves(rows)
        if not saves:
            return
        captures = await self._publisher.capture(saves)
        failures = [
            (save.row.id, each)
            for save, each in zip(saves, captures, strict=True)
            if isinstance(each, Failure)
        ]
        await self._outbox.send(failures)
        publishing = {
            each.save.model.key: (each, background.create_task(self._publisher.publish(each)))
            for each in captures
            if isinstance(each, Capture)
        }
        names = {key: capture.save.model.model_id for key, (capture, _) in publishing.items()}
        for scored in await self._gaps.score(names):  # with the same weights
            background.create_task(self._compare(scored, *publishing[scored.key]))

    async def _saves(self, rows: Sequence[QueuedRow]) -> list[Save]:
        """Without those whose time was over before their turn."""
        with self._store.read() as conn:
            bodies = queue.read_bodies(conn, [row.id for row in rows])
            return [_save(conn, row, bodies[row.id]) for row in rows if row.id in bodies]

    async def _compare(self, scored: ScoredProbe, capture: Capture, publishing: asyncio.Task[bool]) -> None:
        if await publishing:
            await self._gaps.compare(scored, capture.version, inflight=capture.save.inflight)


def _save(conn: Connection, row: QueuedRow, body: bytes) -> Save:
    model = model_records.by_key(conn, model_of(row))
    assert model is not None, "futures refer to models"
    return Save(row, model, SaveSamplerBody.from_bytes(body))

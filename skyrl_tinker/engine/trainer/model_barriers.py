"""Barriers that run alone: creation, load, save and export of one model."""

from collections.abc import Coroutine
from typing import Any

from skyrl_tinker.domain.ids import RequestKind
from skyrl_tinker.engine.outbox import Outbox, failure_of, read_persistently
from skyrl_tinker.engine.saves.external_exports import Exporter
from skyrl_tinker.engine.saves.training_saves import Saver
from skyrl_tinker.engine.scheduling.lanes import Lanes, model_of
from skyrl_tinker.engine.trainer.model_creation import ModelCreation
from skyrl_tinker.engine.trainer.model_lifecycle import ModelLifecycle
from skyrl_tinker.errors import TrainerError
from skyrl_tinker.protocol.stored_requests import (
    CreateViaLoadBody,
    LoadWeightsBody,
    SaveExternalBody,
    SaveWeightsBody,
)
from skyrl_tinker.store.futures import queue
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.store import Store

Write = Coroutine[Any, Any, object]
"""Part of a save that needs no trainer and may run while the model trains."""


class ModelBarriers:
    def __init__(
        self,
        store: Store,
        lanes: Lanes,
        models: ModelLifecycle,
        creation: ModelCreation,
        saver: Saver,
        exporter: Exporter,
        outbox: Outbox,
    ) -> None:
        self._store = store
        self._lanes = lanes
        self._models = models
        self._creation = creation
        self._saver = saver
        self._exporter = exporter
        self._outbox = outbox

    async def execute(self, row: QueuedRow) -> Write | None:
        """Run a request; returns what is left to be written. TrainerError: the workers are broken."""
        model = await self._models.row(model_of(row))
        bodies = await read_persistently(self._store, lambda conn: queue.read_bodies(conn, [row.id]))
        body = bodies.get(row.id)
        if body is None:  # it expired before it started
            return None
        try:
            return await self._execute(row, model, body)
        except TrainerError:
            raise
        except Exception as error:  # becomes the result of this request
            failure = failure_of(error)
            if row.seq_id == 0:
                await self._models.fail_creation(row, model, failure)
            else:
                await self._outbox.send([(row.id, failure)])
            return None

    async def _execute(self, row: QueuedRow, model: ModelRow, body: bytes) -> Write | None:
        match row.kind, row.seq_id:
            case RequestKind.CREATE_MODEL, _:
                await self._models.finish_creation(row, await self._creation.create(model))
            case RequestKind.LOAD_WEIGHTS, 0:
                finished = await self._creation.create_from(model, CreateViaLoadBody.from_bytes(body))
                await self._models.finish_creation(row, finished)
            case RequestKind.LOAD_WEIGHTS, _:
                outcome = await self._creation.load(model, LoadWeightsBody.from_bytes(body))
                self._lanes.reset_window(model.key)
                await self._outbox.send([(row.id, outcome)])
            case RequestKind.SAVE_WEIGHTS, _:
                saving = await self._saver.capture(row, model, SaveWeightsBody.from_bytes(body))
                return self._saver.persist(saving)
            case RequestKind.SAVE_WEIGHTS_EXTERNAL, _:
                exporting = await self._exporter.capture(row, model, SaveExternalBody.from_bytes(body))
                return self._exporter.persist(exporting)
            case kind, _:
                raise AssertionError(f"{kind} is no barrier of one model")
        return None

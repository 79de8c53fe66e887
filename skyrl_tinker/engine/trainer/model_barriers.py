"""Barriers that run alone: creation, load, save and export of one model."""

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from skyrl_tinker.domain.ids import RequestKind
from skyrl_tinker.engine.outbox import failure_of, read_persistently
from skyrl_tinker.engine.saves.external_exports import Exporter
from skyrl_tinker.engine.saves.training_saves import Saver
from skyrl_tinker.engine.scheduling.lanes import Lanes, model_of
from skyrl_tinker.engine.trainer.model_creation import Finished, ModelCreation
from skyrl_tinker.engine.trainer.model_lifecycle import ModelLifecycle
from skyrl_tinker.errors import DiskFullError, TrainerError
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


@dataclass(frozen=True, slots=True)
class BarrierResult:
    """Result of a barrier: `finished` if it is answered now, `write` if it is once that has run."""

    finished: Finished | None = None
    write: Write | None = None


class ModelBarriers:
    def __init__(
        self,
        store: Store,
        lanes: Lanes,
        models: ModelLifecycle,
        creation: ModelCreation,
        saver: Saver,
        exporter: Exporter,
    ) -> None:
        self._store = store
        self._lanes = lanes
        self._models = models
        self._creation = creation
        self._saver = saver
        self._exporter = exporter

    async def execute(self, row: QueuedRow) -> BarrierResult:
        """Run a request. Raises TrainerError: the ranks are broken, DiskFullError: nothing was done."""
        model = await self._models.row(model_of(row))
        bodies = await read_persistently(self._store, lambda conn: queue.read_bodies(conn, [row.id]))
        body = bodies.get(row.id)
        if body is None:  # it expired before it started
            return BarrierResult()
        try:
            return await self._execute(row, model, body)
        except (TrainerError, DiskFullError):
            raise
        except Exception as error:  # becomes the result of this request
            failure = failure_of(error)
            if row.seq_id != 0:
                return BarrierResult(Finished(failure))
            await self._models.fail_creation(row, model, failure)
            return BarrierResult()

    async def _execute(self, row: QueuedRow, model: ModelRow, body: bytes) -> BarrierResult:
        match row.kind, row.seq_id:
            case RequestKind.CREATE_MODEL, _:
                return BarrierResult(await self._creation.create(model))
            case RequestKind.LOAD_WEIGHTS, 0:
                return BarrierResult(
                    await self._creation.create_from(model, CreateViaLoadBody.from_bytes(body))
                )
            case RequestKind.LOAD_WEIGHTS, seq_id:
                assert seq_id is not None, "training requests are numbered"
                loaded = await self._creation.load(model, seq_id, LoadWeightsBody.from_bytes(body))
                self._lanes.reset_window(model.key)
                return BarrierResult(loaded)
            case RequestKind.SAVE_WEIGHTS, _:
                saving = await self._saver.capture(row, model, SaveWeightsBody.from_bytes(body))
                return BarrierResult(write=self._saver.persist(saving))
            case RequestKind.SAVE_WEIGHTS_EXTERNAL, _:
                exporting = await self._exporter.capture(row, model, SaveExternalBody.from_bytes(body))
                return BarrierResult(write=self._exporter.persist(exporting))
            case kind, _:
                raise AssertionError(f"{kind} is no barrier of one model")

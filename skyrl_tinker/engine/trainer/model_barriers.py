"""Barriers that run alone: creation, load, save and export of one model."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from skyrl_tinker.domain.ids import RequestKind
from skyrl_tinker.domain.values import Failure
from skyrl_tinker.engine.outbox import failure_of, persistently
from skyrl_tinker.engine.saves.external_exports import Exporter
from skyrl_tinker.engine.saves.training_saves import Saver
from skyrl_tinker.engine.scheduling.lanes import Lanes
from skyrl_tinker.engine.scheduling.priorities import share_of
from skyrl_tinker.engine.scheduling.row_work import model_of
from skyrl_tinker.engine.trainer.model_creation import Finished, LoadFiles, ModelCreation
from skyrl_tinker.engine.trainer.model_lifecycle import ModelLifecycle
from skyrl_tinker.errors import StorageAwayError, TrainerError
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

Work = Callable[[], Coroutine[Any, Any, object]]
"""Work of a task that may end before it begins: a coroutine, made before, would be lost with it."""


@dataclass(frozen=True, slots=True)
class BarrierResult:
    """Result of a barrier. `finished`: its answer; `write`: work that ends with its answer.

    That is the part of a save that needs no turn of the trainer and may run while the model trains.
    """

    finished: Finished | None = None
    write: Work | None = None


@dataclass(eq=False)
class ModelBarriers:
    _store: Store
    _lanes: Lanes
    _models: ModelLifecycle
    _creation: ModelCreation
    _saver: Saver
    _exporter: Exporter

    def __post_init__(self) -> None:
        self._loads: dict[QueuedRow, LoadFiles | Failure] = {}  # loads that have not begun

    async def fetch(self, row: QueuedRow) -> None:
        """Do the part of a load that needs no trainer, during units; `execute` reports its failure."""
        model, body = await self._models.row(model_of(row)), await self._read(row)
        if body is None:  # it has just expired
            return
        try:
            kind = CreateViaLoadBody if row.seq_id == 0 else LoadWeightsBody
            load, share = kind.from_bytes(body), share_of(row.owner_id, row.session_id)
            self._loads[row] = await self._creation.fetch(model, row.seq_id or 0, load, share)
        except Exception as error:  # becomes the result of this request
            self._loads[row] = failure_of(error)

    async def drop_expired(self) -> None:
        """Drop fetched files of loads that do not wait any more. Call it between units."""
        for row in [row for row in self._loads if not self._lanes.waits(row)]:
            await self._discard(row)

    async def execute(self, row: QueuedRow) -> BarrierResult:
        """Run a request.

        Raises TrainerError if the ranks are broken, StorageAwayError if nothing was done: try again.
        """
        model, body = await self._models.row(model_of(row)), await self._read(row)
        if body is None:  # it expired before it started
            return BarrierResult()
        try:
            result = await self._execute(row, model, body)
        except (TrainerError, StorageAwayError):
            raise
        except Exception as error:  # becomes the result of this request
            await self._discard(row)
            return await self._fail(row, model, failure_of(error))
        if isinstance(load := self._loads.pop(row, None), LoadFiles):
            self._creation.loaded(load)
        return result

    async def _read(self, row: QueuedRow) -> bytes | None:
        bodies = await persistently(self._store.read, lambda conn: queue.read_bodies(conn, [row.id]))
        return bodies.get(row.id)

    async def _fail(self, row: QueuedRow, model: ModelRow, failure: Failure) -> BarrierResult:
        if row.seq_id != 0:
            return BarrierResult(Finished(failure))
        await self._models.fail_creation(row, model, failure)
        return BarrierResult()

    async def _discard(self, row: QueuedRow) -> None:
        load = self._loads.pop(row, None)
        if isinstance(load, LoadFiles):
            await self._creation.discard(load)

    async def _execute(self, row: QueuedRow, model: ModelRow, body: bytes) -> BarrierResult:
        match row.kind, self._loads.get(row):
            case RequestKind.CREATE_MODEL, _:
                return BarrierResult(await self._creation.create(model))
            case RequestKind.LOAD_WEIGHTS, LoadFiles() as files if row.seq_id == 0:
                create = CreateViaLoadBody.from_bytes(body)
                return BarrierResult(await self._creation.create_from(model, create, files))
            case RequestKind.LOAD_WEIGHTS, LoadFiles() as files:
                loaded = await self._creation.load(model, LoadWeightsBody.from_bytes(body), files)
                self._lanes.reset_window(model.key)
                return BarrierResult(loaded)
            case RequestKind.LOAD_WEIGHTS, Failure() as failure:
                return await self._fail(row, model, failure)
            case RequestKind.SAVE_WEIGHTS, _:
                saving = await self._saver.capture(row, model, SaveWeightsBody.from_bytes(body))
                return BarrierResult(write=partial(self._saver.persist, saving))
            case RequestKind.SAVE_WEIGHTS_EXTERNAL, _:
                exporting = await self._exporter.capture(row, model, SaveExternalBody.from_bytes(body))
                return BarrierResult(write=partial(self._exporter.persist, exporting))
            case kind, _:
                raise AssertionError(f"{kind} is no barrier of one model")

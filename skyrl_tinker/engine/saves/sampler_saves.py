"""save_weights_for_sampler: captured on the trainer, several models in one turn, then published.

Publishing (write, load on the samplers, record, answer) takes no turn of the trainer and runs in the
background. If the weight transport can take unnamed full weights from the ranks, these are lent to the
samplers: to idle ones from the capture on, to running requests of an inflight target once the save is
recorded. They are freed when the files are written and no sync reads them; samplers that were busy until then
read the files.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sqlalchemy import Connection

from skyrl_tinker.domain.ids import CheckpointKind, ModelKey, VersionId
from skyrl_tinker.domain.tinker_path import TinkerPath
from skyrl_tinker.domain.values import Failure, WeightVersion
from skyrl_tinker.engine.outbox import failure_of, persistently, when_possible
from skyrl_tinker.engine.parity.drift_monitor import DriftMonitor, ScoredProbe
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.engine.saves.save_flow import Save, SaveFlow
from skyrl_tinker.engine.scheduling.row_work import model_of
from skyrl_tinker.errors import ExhaustedError, SamplerError, SkyrlTinkerError, StorageError, TrainerError
from skyrl_tinker.protocol.stored_requests import SaveSamplerBody
from skyrl_tinker.store import checkpoint_records, model_records, sampling_sessions, weight_versions
from skyrl_tinker.store.futures import queue
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.system.off_loop import in_disk_thread
from skyrl_tinker.training.trainer_group import CapturedState

_log = logging.getLogger(__name__)
Start = Callable[[Coroutine[Any, Any, Any]], "asyncio.Task[Any]"]
"""Start work in the background."""
StartWrite = Callable[[QueuedRow, Coroutine[Any, Any, Any]], "asyncio.Task[Any]"]
"""Start the rest of a save; a recovery of the trainer waits for it while it needs the ranks."""


class SamplerSaveRequest(NamedTuple):
    row: QueuedRow
    model: ModelRow
    body: SaveSamplerBody

    @property
    def path(self) -> TinkerPath | None:
        """Path of a named save, None for unnamed weights."""
        name = self.body.name
        return TinkerPath(self.model.model_id, CheckpointKind.SAMPLER_WEIGHTS, name) if name else None

    @property
    def kind(self) -> Literal["lora", "full"]:
        return "lora" if self.model.spec.rank else "full"


@dataclass(frozen=True, slots=True)
class SamplerSave(Save[SaveSamplerBody]):
    version: WeightVersion

    @property
    def inflight(self) -> bool:
        return self.body.kind == "inflight"

    @property
    def sampled_next(self) -> bool:
        """True for unnamed weights: named ones may be used much later."""
        return self.path is None


@dataclass(eq=False)
class Publisher(SaveFlow[SamplerSave]):
    """Flow of weights for samplers. `_samplers` None: they are only written.

    `_count_published`: for metrics. `_written`: called, once or twice, when a save's weights are in files or
    the save has failed.
    """

    _samplers: Samplers | None
    _ephemeral: Path
    _gaps: DriftMonitor
    _count_published: Callable[[Literal["lora", "full"], int, float], None]
    _written: Callable[[QueuedRow], None]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._lent: dict[int, SamplerSave] = {}  # by future id

    async def capture_rows(self, rows: Sequence[QueuedRow]) -> dict[int, SamplerSave | Failure]:
        """Capture the weights of each request, by future id, as `capture` does."""
        requests = await persistently(self._store.read, partial(_requests, rows=rows))
        saves = await self.capture(requests)
        return {request.row.id: save for request, save in zip(requests, saves, strict=True)}

    async def publish(
        self, saves: Sequence[SamplerSave], write: StartWrite, compare: Start
    ) -> dict[ModelKey, asyncio.Task[bool]]:
        """Publish and compare in the background; score the probe on the trainer, with the same weights.

        `compare` starts work that may wait for absent samplers. Returns by model the task that ends when its
        save is answered.
        """
        publishing = {save.model.key: (save, write(save.row, self.persist(save))) for save in saves}
        names = {key: save.model.model_id for key, (save, _) in publishing.items()}
        for scored in await self._gaps.score(names):
            compare(self._compare(scored, *publishing[scored.key]))
        return {key: task for key, (_, task) in publishing.items()}

    async def capture(self, requests: Sequence[SamplerSaveRequest]) -> list[SamplerSave | Failure]:
        """Capture all requests' weights in one call; `persist` must follow. Raises TrainerError.

        If there is no memory for all of them, each is captured alone.
        """
        durable = {request.model.key: request.body.name is not None for request in requests}
        try:
            captured = await self._trainer.capture_weights(durable) if requests else {}
        except TrainerError:
            raise
        except SkyrlTinkerError as error:
            if isinstance(error, ExhaustedError) and len(requests) > 1:
                return [save for request in requests for save in await self.capture([request])]
            return [failure_of(error) for _ in requests]
        begun = await self._begin(requests, captured)
        for request, save in zip(requests, begun, strict=True):
            if isinstance(save, Failure):
                await captured[request.model.key].drop()
        return begun

    async def restore(self, row: QueuedRow, model: ModelRow) -> None:
        """Write the files of a published version again if they are gone, as after a reboot.

        The model must be in its state at this save. Raises TrainerError: the ranks are broken.
        """
        find = partial(weight_versions.version_of_save, model_key=model.key, future_id=row.id)
        version = await persistently(self._store.read, find)
        if version is None or await in_disk_thread(Path(version.directory).exists):
            return
        try:
            captured = (await self._trainer.capture_weights({model.key: False}))[model.key]
            try:
                await when_possible(self._write_lost, captured, Path(version.directory))
            finally:
                await captured.drop()
        except (StorageError, ExhaustedError) as error:
            _log.error("%s could not be written again: %s", version.name, error)

    async def _write_lost(self, captured: CapturedState, directory: Path) -> None:
        if not await in_disk_thread(directory.exists):
            await self._trainer.persist_state(captured, str(directory))

    async def _answer(self, save: SamplerSave) -> bool:
        async with asyncio.TaskGroup() as tasks:
            announcing: asyncio.Task[None] | None = None
            if (samplers := self._borrower(save)) is not None:
                self._lent[save.row.id] = save
                samplers.swaps.lend(save.version, save.captured)
                if not save.inflight:  # rollouts must not use weights of a save that may still fail
                    announcing = tasks.create_task(samplers.announce(save.version))
            started = time.monotonic()
            succeeded = await super()._answer(save)
            if succeeded:
                self._count_published(save.version.kind, save.row.id, time.monotonic() - started)
            elif announcing is not None:  # a recovery of the ranks must not wait for samplers
                announcing.cancel()
        if succeeded and self._samplers is not None:
            await _announce(self._samplers, save)
        return succeeded

    def _borrower(self, save: SamplerSave) -> Samplers | None:
        """Return the samplers if they take these weights from the ranks."""
        lends = save.version.kind == "full" and save.sampled_next
        samplers = self._samplers
        return samplers if lends and samplers and samplers.swaps.transport.takes_captured else None

    async def _begin(
        self, requests: Sequence[SamplerSaveRequest], captured: Mapping[ModelKey, CapturedState]
    ) -> list[SamplerSave | Failure]:
        """Reserve the names, and number the versions of all in one commit."""
        failures: dict[int, Failure] = {}
        try:
            async with AsyncExitStack() as names:
                for request in requests:
                    try:
                        await names.enter_async_context(self._reserving(request.path))
                    except Exception as error:  # also the database's: the result of this request alone
                        failures[request.row.id] = failure_of(error)
                fine = [request for request in requests if request.row.id not in failures]
                numbers = await persistently(self._store.write, partial(_insert_versions, saves=fine))
        except Exception as error:  # of the commit, or unforeseen: nobody else answers the requests
            return [failures.get(request.row.id) or failure_of(error) for request in requests]
        versions = {request.row.id: number for request, number in zip(fine, numbers, strict=True)}
        return [
            failures.get(request.row.id)
            or self._started(request, versions[request.row.id], captured[request.model.key])
            for request in requests
        ]

    def _started(
        self, request: SamplerSaveRequest, number: VersionId, captured: CapturedState
    ) -> SamplerSave:
        row, model, body = request
        version, path = WeightVersion(number, request.kind, ""), request.path
        directory = self._new_directory(row, model, path) if path else self._ephemeral / version.name
        version = replace(version, directory=str(directory))
        return SamplerSave(row, model, body, path, directory, captured, version)

    async def _write(self, save: SamplerSave) -> int:
        """Write the files, and load them before the answer: the probe then comes ahead of clients' samples.

        Rows of one adapter that share a step with others have other last bits than alone.
        """
        size = await self._trainer.persist_state(save.captured, str(save.directory))
        loading = [] if self._samplers is None else [self._samplers.load(save.version)]  # may take long
        await asyncio.gather(self._need_ranks_no_more(save), *loading)
        return size

    async def _need_ranks_no_more(self, save: SamplerSave) -> None:
        if self._borrower(save) is None:
            await self._free(save)
        self._pending.note_here(save.row.id)

    async def _free(self, save: SamplerSave) -> None:
        if self._lent.pop(save.row.id, None) is not None and self._samplers is not None:
            await self._samplers.swaps.end_loan(save.version)
        await super()._free(save)
        self._written(save.row)

    async def end_loans(self) -> None:
        """Free the captures whose files are here: samplers that were busy until now read those."""
        for save in [save for save in self._lent.values() if self._pending.is_here(save.row.id)]:
            await self._free(save)

    def _record(self, conn: Connection, save: SamplerSave, size: int) -> Mapping[str, Any]:
        version, directory = save.version.id, str(save.directory)
        weight_versions.publish_version(conn, version, directory, size, save.steps(conn))
        if save.path is None:
            return {"sampling_session_id": _create_session(conn, save)}
        checkpoint = save.checkpoint(conn, size, user_metadata=save.body.user_metadata, version_id=version)
        checkpoint_records.add(conn, checkpoint, replace=False)
        return {"path": str(save.path)}

    def _recorded(self, conn: Connection, save: SamplerSave) -> bool:
        return weight_versions.was_published(conn, save.version.id)

    async def _remove(self, save: SamplerSave) -> None:
        if self._samplers is not None:
            with suppress(SamplerError):  # a sampler that is down has no adapters anyway
                await self._samplers.unload(save.version)
        await super()._remove(save)
        drop = partial(weight_versions.mark_dropped, version_id=save.version.id)
        await persistently(self._store.write, drop)

    async def _compare(self, scored: ScoredProbe, save: SamplerSave, publishing: asyncio.Task[bool]) -> None:
        if await publishing:
            await self._gaps.compare(scored, save.version, inflight=save.inflight)


async def _announce(samplers: Samplers, save: SamplerSave) -> None:
    """Announce the weights sampled next: the new version, or the inflight target moved to it."""
    if save.inflight:
        await samplers.announce(samplers.target(save.model.key, save.version))
    elif save.sampled_next:
        await samplers.announce(save.version)


def _requests(conn: Connection, rows: Sequence[QueuedRow]) -> list[SamplerSaveRequest]:
    """Read the requests, without those that expired before their turn."""
    bodies = queue.read_bodies(conn, [row.id for row in rows])
    return [
        SamplerSaveRequest(
            row, model_records.by_key(conn, model_of(row)), SaveSamplerBody.from_bytes(bodies[row.id])
        )
        for row in rows
        if row.id in bodies
    ]


def _insert_versions(conn: Connection, saves: Sequence[SamplerSaveRequest]) -> list[VersionId]:
    return [
        weight_versions.insert_version(
            conn,
            model_key=save.model.key,
            kind=save.kind,
            durable=save.path is not None,
            inflight=save.body.kind == "inflight",
            future_id=save.row.id,
        )
        for save in saves
    ]


def _create_session(conn: Connection, save: SamplerSave) -> str:
    number = save.body.sampling_session_seq_id
    assert number is not None, "validated: a save has a name or a sampling_session_seq_id"
    return sampling_sessions.create(
        conn,
        save.model.session_id,
        number,
        base_model=save.model.base_model,
        model_path=None,
        version_id=save.version.id,
    )

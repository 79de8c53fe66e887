"""save_weights_for_sampler: captured on the trainer, which then goes on; published in the background."""

import asyncio
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from sqlalchemy.ext.asyncio import AsyncConnection

from skyrl_tinker.engine.answers import Outbox, failure_of, finish_all, json_answer, persistently
from skyrl_tinker.engine.metrics import Metrics
from skyrl_tinker.engine.models import expiry, free_directory, require_free
from skyrl_tinker.engine.samplers import Samplers
from skyrl_tinker.errors import SamplerError, SkyrlTinkerError, UserError
from skyrl_tinker.store import checkpoints, sampling
from skyrl_tinker.store.checkpoints import NewCheckpoint
from skyrl_tinker.store.futures import QueuedRow
from skyrl_tinker.store.models import ModelRow
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.group import TrainerGroup
from skyrl_tinker.training.manifest import Manifest, entry_of, write_manifest
from skyrl_tinker.weight_sync.adapters import publish_adapter
from skyrl_tinker.wire.bodies import SaveSamplerBody
from skyrl_tinker.wire.ids import CheckpointKind
from skyrl_tinker.wire.paths import TinkerPath
from skyrl_tinker.wire.values import AdapterWeights, BaseModelFacts, WeightVersion

TYPE = "save_weights_for_sampler"


@dataclass(frozen=True, slots=True)
class Capture:
    """Weights as they were when the save had its turn. `adapter` None: full ones, in `staging` already."""

    row: QueuedRow
    model: ModelRow
    body: SaveSamplerBody
    version: WeightVersion
    adapter: AdapterWeights | None

    @property
    def directory(self) -> Path:
        return Path(self.version.directory)

    @property
    def staging(self) -> Path:
        return self.directory.with_name(f".{self.directory.name}.partial")

    @property
    def path(self) -> TinkerPath | None:
        return _path(self.model, self.body)

    @property
    def inflight(self) -> bool:
        return self.body.kind == "inflight"


class Publisher:
    def __init__(
        self,
        store: Store,
        trainer: TrainerGroup,
        samplers: Samplers,
        outbox: Outbox,
        facts: BaseModelFacts,
        ephemeral_dir: Path,
        checkpoint_root: Path,
        metrics: Metrics,
    ) -> None:
        self._store = store
        self._trainer = trainer
        self._samplers = samplers
        self._outbox = outbox
        self._facts = facts
        self._ephemeral = ephemeral_dir
        self._root = checkpoint_root
        self._metrics = metrics
        self._taken: set[TinkerPath] = set()  # names whose publication is under way

    async def capture(self, row: QueuedRow, model: ModelRow, body: SaveSamplerBody) -> Capture:
        """The trainer's part. Raises SkyrlTinkerError."""
        path = _path(model, body)
        if path is not None:
            await self._take(path)
        try:
            return await self._capture(row, model, body)
        except BaseException:
            self._free(path)
            raise

    async def publish(self, capture: Capture) -> bool:
        """Write, load on the samplers, and answer; a failure is the answer as well. Whether it went well."""
        started = time.monotonic()
        try:
            size = await asyncio.to_thread(_write, capture, self._facts.directory)
            await self._samplers.load(capture.version)
            await self._outbox.commit(_record(capture, size), capture.row.id)
        except Exception as error:  # becomes the result of this request
            await self._give_up(capture)
            await self._outbox.send([(capture.row.id, failure_of(error))])
            return False
        else:
            self._metrics.published(capture.version.kind, time.monotonic() - started)
            await self._announce(capture)
            return True
        finally:
            self._free(capture.path)

    async def _announce(self, capture: Capture) -> None:
        """The target moves in the moment in which its new version is committed: nobody samples less."""
        if capture.inflight:
            await self._samplers.announce(self._samplers.target(capture.model.key, capture.version))
        elif capture.path is None:  # one with a name may be for another day
            await self._samplers.announce(capture.version)

    async def _take(self, path: TinkerPath) -> None:
        await require_free(self._store, path)
        if path in self._taken:
            raise UserError(f"checkpoint {path} is being saved by an earlier request: choose another name")
        self._taken.add(path)

    def _free(self, path: TinkerPath | None) -> None:
        if path is not None:
            self._taken.discard(path)

    async def _capture(self, row: QueuedRow, model: ModelRow, body: SaveSamplerBody) -> Capture:
        version = await self._new_version(row, model, body)
        if model.spec.rank:
            return Capture(row, model, body, version, await self._trainer.capture_adapter(model.key))
        capture = Capture(row, model, body, version, None)
        try:
            await asyncio.to_thread(_make_anew, capture.staging)
            await self._trainer.capture_full(model.key, str(capture.staging))
        except (SkyrlTinkerError, OSError):  # what filled the memory must not go on filling it
            await asyncio.to_thread(shutil.rmtree, capture.staging, ignore_errors=True)
            raise
        return capture

    async def _new_version(self, row: QueuedRow, model: ModelRow, body: SaveSamplerBody) -> WeightVersion:
        kind: Literal["lora", "full"] = "lora" if model.spec.rank else "full"
        path = _path(model, body)
        number = await self._store.write(
            lambda conn: sampling.new_version(
                conn, model.key, kind, durable=path is not None, inflight=body.kind == "inflight"
            )
        )
        version = WeightVersion(number, kind, "")
        if path is not None:
            return replace(version, directory=str(free_directory(self._root, model, path, row.id)))
        return replace(version, directory=str(self._ephemeral / version.name))

    async def _give_up(self, capture: Capture) -> None:
        with suppress(SamplerError):  # a sampler that is down has no adapters anyway
            await self._samplers.drop(capture.version)
        for directory in (capture.staging, capture.directory):
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
        drop = partial(sampling.drop_version, version_id=capture.version.id)
        await persistently(lambda: self._store.write(drop))


def _path(model: ModelRow, body: SaveSamplerBody) -> TinkerPath | None:
    return TinkerPath(model.model_id, CheckpointKind.SAMPLER_WEIGHTS, body.name) if body.name else None


def _record(capture: Capture, size: int) -> Callable[[AsyncConnection], Any]:
    """The version, what it is for, and the answer, in one commit."""

    async def op(conn: AsyncConnection) -> None:
        await sampling.set_directory(conn, capture.version.id, str(capture.directory))
        if capture.path is not None:
            await checkpoints.add(conn, _checkpoint(capture, capture.path, size), replace=False)
            answer = {"path": str(capture.path), "type": TYPE}
        else:
            answer = {"sampling_session_id": await _session(conn, capture), "type": TYPE}
        await finish_all(conn, {capture.row.id: json_answer(answer)})

    return op


async def _session(conn: AsyncConnection, capture: Capture) -> str:
    number = capture.body.sampling_session_seq_id
    assert number is not None, "validated: a save has a name or a sampling_session_seq_id"
    return await sampling.create(
        conn,
        capture.model.session_id,
        number,
        base_model=capture.model.base_model,
        model_path=None,
        version_id=capture.version.id,
    )


def _checkpoint(capture: Capture, path: TinkerPath, size: int) -> NewCheckpoint:
    return NewCheckpoint(
        model_key=capture.model.key,
        kind=path.kind,
        name=path.name,
        directory=str(capture.directory),
        base_model=capture.model.base_model,
        spec=capture.model.spec,
        size_bytes=size,
        user_metadata=capture.body.user_metadata,
        version_id=capture.version.id,
        expires_at=expiry(capture.body.ttl_seconds),
    )


def _write(capture: Capture, base_model: str) -> int:
    """The directory appears only when it is complete. Returns its size in bytes."""
    if capture.adapter is not None:
        publish_adapter(capture.adapter, capture.staging, base_model)
    if capture.path is not None:
        _describe(capture, base_model)
    capture.staging.rename(capture.directory)
    return sum(file.stat().st_size for file in capture.directory.iterdir())


def _describe(capture: Capture, base_model: str) -> None:
    """A durable checkpoint carries a manifest and is on disk before it is seen."""
    files = {file.name: entry_of(file) for file in sorted(capture.staging.iterdir())}
    write_manifest(capture.staging, Manifest(base_model, capture.model.spec, 0, False, files))
    for path in (*capture.staging.iterdir(), capture.staging):
        _flush(path)


def _make_anew(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

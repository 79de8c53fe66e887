"""save_weights_for_sampler: captured on the trainer, which then goes on; published in the background."""

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from sqlalchemy import Connection

from skyrl_tinker.domain.ids import CheckpointKind, ModelKey
from skyrl_tinker.domain.manifest import Manifest, entry_of, write_manifest
from skyrl_tinker.domain.tinker_path import TinkerPath
from skyrl_tinker.domain.values import AdapterWeights, BaseModelFacts, Failure, WeightVersion
from skyrl_tinker.engine.engine_metrics import Metrics
from skyrl_tinker.engine.outbox import Outbox, failure_of, finish_all, json_answer, persistently
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.engine.saves.checkpoint_names import free_directory, require_free
from skyrl_tinker.errors import SamplerError, SkyrlTinkerError, TrainerError, UserError
from skyrl_tinker.protocol.stored_requests import SaveSamplerBody
from skyrl_tinker.store import checkpoint_records, sampling_sessions
from skyrl_tinker.store.checkpoint_records import NewCheckpoint, expiry
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.trainer_group import TrainerGroup
from skyrl_tinker.weight_sync.adapter_files import flush, publish_adapter

TYPE = "save_weights_for_sampler"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Save:
    """A request whose turn has come."""

    row: QueuedRow
    model: ModelRow
    body: SaveSamplerBody

    @property
    def path(self) -> TinkerPath | None:
        if not self.body.name:
            return None
        return TinkerPath(self.model.model_id, CheckpointKind.SAMPLER_WEIGHTS, self.body.name)

    @property
    def inflight(self) -> bool:
        return self.body.kind == "inflight"


@dataclass(frozen=True, slots=True)
class Capture:
    """Weights as they were when the save had its turn. `adapter` None: full ones, in `staging` already."""

    save: Save
    version: WeightVersion
    adapter: AdapterWeights | None

    @property
    def directory(self) -> Path:
        return Path(self.version.directory)

    @property
    def staging(self) -> Path:
        return self.directory.with_name(f".{self.directory.name}.partial")


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

    async def capture(self, saves: Sequence[Save]) -> list[Capture | Failure]:
        """The trainer's part: adapters of several models in one call, full weights one after another.

        By save, and what fails in one is its own. TrainerError: the workers are broken.
        """
        begun = [await _or_failure(self._begin(save)) for save in saves]
        started = [each for each in begun if isinstance(each, Capture)]
        models = [each.save.model.key for each in started if each.version.kind == "lora"]
        adapters = await _or_failure(self._trainer.capture_adapters(models)) if models else {}
        return [await self._filled(each, adapters) if isinstance(each, Capture) else each for each in begun]

    async def publish(self, capture: Capture) -> bool:
        """Write, load on the samplers, and answer; a failure is the answer as well. Whether it went well."""
        started = time.monotonic()
        try:
            size = await asyncio.to_thread(_write, capture, self._facts.directory)
            await self._samplers.load(capture.version)
            record = _record(capture, size)
            await persistently(lambda: self._outbox.commit(record, capture.save.row.id))
        except Exception as error:  # becomes the result of this request
            await self._give_up(capture)
            await self._outbox.send([(capture.save.row.id, failure_of(error))])
            return False
        else:
            self._metrics.published(capture.version.kind, time.monotonic() - started)
            await self._announce(capture)
            return True
        finally:
            self._free(capture.save.path)

    async def _announce(self, capture: Capture) -> None:
        """The target moves in the moment in which its new version is committed: nobody samples less."""
        if capture.save.inflight:
            await self._samplers.announce(self._samplers.target(capture.save.model.key, capture.version))
        elif capture.save.path is None:  # one with a name may be for another day
            await self._samplers.announce(capture.version)

    async def _begin(self, save: Save) -> Capture:
        """Without weights yet. Raises SkyrlTinkerError."""
        self._take(save.path)
        with ExitStack() as failed:
            failed.callback(self._free, save.path)
            if save.path is not None:
                await require_free(self._store, save.path)
            capture = Capture(save, await self._new_version(save), None)
            failed.pop_all()
        return capture

    async def _filled(
        self, capture: Capture, adapters: Mapping[ModelKey, AdapterWeights] | Failure
    ) -> Capture | Failure:
        filled: Capture | Failure
        if capture.version.kind == "full":
            filled = await _or_failure(self._capture_full(capture))
        elif isinstance(adapters, Failure):
            filled = adapters
        else:
            filled = replace(capture, adapter=adapters[capture.save.model.key])
        if isinstance(filled, Failure):
            self._free(capture.save.path)
        return filled

    async def _capture_full(self, capture: Capture) -> Capture:
        try:
            await asyncio.to_thread(_make_anew, capture.staging)
            await self._trainer.capture_full(capture.save.model.key, str(capture.staging))
        except (SkyrlTinkerError, OSError):  # what filled the memory must not go on filling it
            await asyncio.to_thread(shutil.rmtree, capture.staging, ignore_errors=True)
            raise
        return capture

    def _take(self, path: TinkerPath | None) -> None:
        """Before looking for it in the store: it is freed only when it stands there."""
        if path is None:
            return
        if path in self._taken:
            raise UserError(f"checkpoint {path} is being saved by an earlier request: choose another name")
        self._taken.add(path)

    def _free(self, path: TinkerPath | None) -> None:
        if path is not None:
            self._taken.discard(path)

    async def _new_version(self, save: Save) -> WeightVersion:
        kind: Literal["lora", "full"] = "lora" if save.model.spec.rank else "full"
        number = await self._store.write(
            lambda conn: sampling_sessions.insert_version(
                conn, save.model.key, kind, durable=save.path is not None, inflight=save.inflight
            )
        )
        version = WeightVersion(number, kind, "")
        if save.path is not None:
            directory = free_directory(self._root, save.model, save.path, save.row.id)
            return replace(version, directory=str(directory))
        return replace(version, directory=str(self._ephemeral / version.name))

    async def _give_up(self, capture: Capture) -> None:
        with suppress(SamplerError):  # a sampler that is down has no adapters anyway
            await self._samplers.drop(capture.version)
        for directory in (capture.staging, capture.directory):
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
        drop = partial(sampling_sessions.mark_dropped, version_id=capture.version.id)
        await persistently(lambda: self._store.write(drop))


async def _or_failure(work: Awaitable[T]) -> T | Failure:
    """TrainerError: the workers are broken."""
    try:
        return await work
    except TrainerError:
        raise
    except Exception as error:  # becomes the result of the request
        return failure_of(error)


def _record(capture: Capture, size: int) -> Callable[[Connection], Any]:
    """The version, what it is for, and the answer, in one commit."""

    def op(conn: Connection) -> None:
        sampling_sessions.publish_version(conn, capture.version.id, str(capture.directory))
        if capture.save.path is not None:
            checkpoint_records.add(conn, _checkpoint(capture, capture.save.path, size), replace=False)
            answer = {"path": str(capture.save.path), "type": TYPE}
        else:
            answer = {"sampling_session_id": _session(conn, capture), "type": TYPE}
        finish_all(conn, {capture.save.row.id: json_answer(answer)})

    return op


def _session(conn: Connection, capture: Capture) -> str:
    number = capture.save.body.sampling_session_seq_id
    assert number is not None, "validated: a save has a name or a sampling_session_seq_id"
    return sampling_sessions.create(
        conn,
        capture.save.model.session_id,
        number,
        base_model=capture.save.model.base_model,
        model_path=None,
        version_id=capture.version.id,
    )


def _checkpoint(capture: Capture, path: TinkerPath, size: int) -> NewCheckpoint:
    return NewCheckpoint(
        model_key=capture.save.model.key,
        kind=path.kind,
        name=path.name,
        directory=str(capture.directory),
        base_model=capture.save.model.base_model,
        spec=capture.save.model.spec,
        size_bytes=size,
        user_metadata=capture.save.body.user_metadata,
        version_id=capture.version.id,
        expires_at=expiry(capture.save.body.ttl_seconds),
    )


def _write(capture: Capture, base_model: str) -> int:
    """The directory appears only when it is complete. Returns its size in bytes."""
    if capture.adapter is not None:
        publish_adapter(capture.adapter, capture.staging, base_model)
    if capture.save.path is not None:
        _describe(capture, base_model)
    capture.staging.rename(capture.directory)
    return sum(file.stat().st_size for file in capture.directory.iterdir())


def _describe(capture: Capture, base_model: str) -> None:
    """A durable checkpoint carries a manifest and is on disk before it is seen."""
    files = {file.name: entry_of(file) for file in sorted(capture.staging.iterdir())}
    write_manifest(capture.staging, Manifest(base_model, capture.save.model.spec, 0, None, files))
    for path in (*capture.staging.iterdir(), capture.staging):
        flush(path)


def _make_anew(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)

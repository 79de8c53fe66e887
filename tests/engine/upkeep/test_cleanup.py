"""Clean-up removes what clients leave behind, but nothing that is still in use. The samplers are scripted."""

import asyncio
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from skyrl_tinker.config import EphemeralWeights, Settings, Timeouts
from skyrl_tinker.domain.ids import CheckpointKind, SamplingSessionId, SessionId, VersionId
from skyrl_tinker.domain.values import LoraSpec, WeightVersion
from skyrl_tinker.engine.bases.sample_dispatch import SampleDispatch
from skyrl_tinker.engine.outbox import Outbox
from skyrl_tinker.engine.sampler.ephemeral_versions import EphemeralVersions
from skyrl_tinker.engine.sampler.sampler_driver import SamplerDriver
from skyrl_tinker.engine.sampler.tmpfs_spill import TmpfsSpill
from skyrl_tinker.engine.scheduling.slots import Concurrency
from skyrl_tinker.engine.suspends import SUSPENDED_S
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.engine.upkeep.cleanup import Cleanup
from skyrl_tinker.engine.upkeep.purge import Purge
from skyrl_tinker.errors import GoneError, StorageError
from skyrl_tinker.storage.storage_port import LOCAL_DISK, Storage
from skyrl_tinker.store import checkpoint_records, sampling_sessions, session_records, weight_versions
from skyrl_tinker.store.checkpoint_records import NewCheckpoint
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.futures import queue, sample_submission
from skyrl_tinker.store.futures.sample_submission import NewSample
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.store import Store
from tests.engine.sampler.test_sampler_driver import submit_sample
from tests.engine.support import journal
from tests.support.reads import reading
from tests.support.scripted_samplers import ScriptedSamplers
from tests.support.waiting import end, until


class Parts:
    """Stands for the trainer, the sampler driver and the samplers."""

    def __init__(self) -> None:
        self.used: set[int] = set()
        self.begins: set[int] = set()  # to be used, while it is being dropped
        self.dropped: list[int] = []
        self.idle: dict[int, float] = {}

    def idle_s(self, version: WeightVersion) -> float:
        return self.idle.get(version.id, 0.0)

    def in_use(self, version: WeightVersion) -> bool:
        return version.id in self.used

    async def unload(self, version: WeightVersion) -> None:
        self.dropped.append(version.id)
        self.used |= self.begins

    def forget_sources(self, version: WeightVersion) -> None:
        pass

    async def end_sessions(self, reasons: Mapping[SessionId, str]) -> None:
        pass

    def release(self, model: int, base_model: str) -> None:
        pass

    def is_loading(self, directory: str) -> bool:
        return False


@pytest.fixture
def parts() -> Parts:
    return Parts()


def cleanup_of(
    store: Store,
    parts: Parts,
    root: Path,
    timeout_s: float = 600.0,
    storage: Storage = LOCAL_DISK,
    samples: SampleDispatch | None = None,
) -> Cleanup:
    any_part = cast(Any, parts)
    spill = TmpfsSpill(root / "memory", root / "disk")
    (root / "memory").mkdir(exist_ok=True)
    kept = EphemeralWeights(keep=2, idle_s=60.0)
    settings = Settings(home=root, timeouts=Timeouts(session_s=timeout_s), ephemeral=kept)
    versions = EphemeralVersions(store, [any_part], any_part.forget_sources, spill, settings)
    return Cleanup(store, any_part, samples or any_part, parts.is_loading, versions, settings, storage)


async def new_model(store: Store, session: SessionId) -> ModelRow:
    accepted = await journal.submit_create(store, session)
    assert accepted.model_id is not None
    return await journal.model_of(store, accepted.model_id)


def make(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / "adapter_model.safetensors").touch()


async def new_version(
    store: Store, model: ModelRow, directory: Path, *, durable: bool, size_bytes: int = 0
) -> WeightVersion:
    make(directory)

    def op(conn: Connection) -> WeightVersion:
        number = weight_versions.insert_version(conn, model.key, "lora", durable=durable)
        weight_versions.publish_version(conn, number, str(directory), size_bytes)
        return WeightVersion(number, "lora", str(directory))

    return await store.write(op)


async def expired_checkpoint(store: Store, model: ModelRow, version: WeightVersion, name: str = "a") -> None:
    new = NewCheckpoint(
        model.key,
        CheckpointKind.SAMPLER_WEIGHTS,
        name,
        version.directory,
        "tiny",
        LoraSpec(8, 1),
        1,
        version_id=version.id,
        expires_at=time.time() - 1,
    )
    await store.write(lambda conn: checkpoint_records.add(conn, new, replace=False))


def exists(version: WeightVersion) -> bool:
    return Path(version.directory).exists()


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


async def finish(store: Store, session: SessionId) -> None:
    await store.write(lambda conn: session_records.finish(conn, session, "success", None))


async def ended_version(store: Store, root: Path) -> WeightVersion:
    """Return unnamed weights whose session has ended."""
    session = await journal.new_session(store)
    model = await new_model(store, session)
    version = await new_version(store, model, root / "memory" / "v1", durable=False)
    await finish(store, session)
    return version


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Advance the wall clock by seconds."""

    def advance(seconds: float) -> None:
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + seconds)

    return advance


async def test_a_silent_session_that_only_samples_is_ended(
    store: Store, parts: Parts, tmp_path: Path, pass_time: Callable[[float], None]
) -> None:
    session = await journal.new_session(store)
    cleanup = cleanup_of(store, parts, tmp_path, timeout_s=SUSPENDED_S / 3)
    pass_time(SUSPENDED_S / 2)
    await cleanup.sweep()
    with pytest.raises(GoneError, match="expired"):
        await journal.heartbeat(store, session)


async def test_samples_of_sessions_that_are_finished_are_stopped_and_no_others(
    store: Store, bell: Doorbell, parts: Parts, tmp_path: Path, pass_time: Callable[[float], None]
) -> None:
    """Went silent, or was ended: nobody asks for what may take the samplers minutes."""
    silent, ended, later, live = [await journal.new_session(store) for _ in range(4)]
    samplers, metrics = ScriptedSamplers(), Metrics()
    samplers.go_on.clear()
    outbox = Outbox(store, bell, metrics)
    driver = SamplerDriver(store, cast(Any, samplers), outbox, Concurrency(8, 8), metrics)
    accepted = {
        session: await submit_sample(store, session, "tiny", 1, (number, 1))
        for number, session in enumerate((silent, ended, later, live))
    }
    rows = await store.read(lambda conn: queue.queued_after(conn, 0))
    metrics.arrived(rows)
    driver.submit(rows)
    running = asyncio.create_task(driver.run())
    await until(lambda: len(samplers.drawn) == 4)
    cleanup = cleanup_of(
        store, parts, tmp_path, timeout_s=SUSPENDED_S / 3, samples=SampleDispatch([driver], outbox, metrics)
    )
    pass_time(SUSPENDED_S / 2)
    for session in (later, live):
        await journal.heartbeat(store, session)
    for session in (ended, later):
        await store.write(partial(session_records.finish, session_id=session, reason="error", detail=None))
        await cleanup.sweep()
    for session, reason in ((silent, "expired"), (ended, "error"), (later, "error")):
        failure = await journal.error_of(store, accepted[session])
        assert failure.message == f"this sample was stopped: session {session} is finished ({reason})"
    assert sorted(samplers.stopped) == [(0, 1), (1, 1), (2, 1)]
    assert driver.in_flight() == 1
    samplers.go_on.set()
    await until(lambda: driver.in_flight() == 0)
    await end(running)


async def test_after_the_machine_was_suspended_clients_get_their_time_again(
    store: Store, parts: Parts, tmp_path: Path, pass_time: Callable[[float], None]
) -> None:
    session = await journal.new_session(store)
    cleanup = cleanup_of(store, parts, tmp_path, timeout_s=SUSPENDED_S / 3)
    pass_time(3600.0)
    await cleanup.sweep()
    await journal.heartbeat(store, session)
    pass_time(SUSPENDED_S / 2)
    await cleanup.sweep()
    with pytest.raises(GoneError, match="expired"):
        await journal.heartbeat(store, session)


async def test_weights_under_a_running_sample_outlive_their_session(
    store: Store, parts: Parts, tmp_path: Path
) -> None:
    version = await ended_version(store, tmp_path)
    cleanup = cleanup_of(store, parts, tmp_path)
    parts.used.add(version.id)
    await cleanup.sweep()
    assert exists(version)
    assert parts.dropped == []
    parts.used.clear()
    await cleanup.sweep()
    assert not exists(version)
    assert parts.dropped == [version.id]


async def test_a_sample_that_begins_while_its_weights_are_dropped_keeps_them(
    store: Store, parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = await ended_version(store, tmp_path)
    cleanup, mark = cleanup_of(store, parts, tmp_path), weight_versions.mark_dropped

    def used_meanwhile(conn: Connection, version_id: VersionId) -> None:
        mark(conn, version_id)
        parts.used.add(version_id)

    with monkeypatch.context() as patch:
        patch.setattr(weight_versions, "mark_dropped", used_meanwhile)
        await cleanup.sweep()
    assert exists(version)
    assert await store.read(weight_versions.list_ephemeral_versions) == [version]
    parts.used.clear()
    await cleanup.sweep()
    assert not exists(version)


async def test_all_but_the_newest_ephemeral_weights_go_once_they_are_idle(
    store: Store, parts: Parts, tmp_path: Path, pass_time: Callable[[float], None]
) -> None:
    session = await journal.new_session(store)
    models = [await new_model(store, session), await new_model(store, await journal.new_session(store))]
    versions = [
        await new_version(store, model, tmp_path / "memory" / f"v{number}-{model.key}", durable=number == 0)
        for number in range(5)
        for model in models
    ]
    pass_time(61.0)
    parts.idle = {version.id: 61.0 for version in versions}
    parts.idle[versions[2].id] = 59.0
    parts.used.add(versions[4].id)
    await cleanup_of(store, parts, tmp_path).sweep()
    assert [exists(version) for version in versions] == [True] * 3 + [False, True, False] + [True] * 4


async def test_a_sample_that_begins_while_its_version_is_dropped_keeps_the_files(
    store: Store, parts: Parts, tmp_path: Path
) -> None:
    version = await ended_version(store, tmp_path)
    cleanup = cleanup_of(store, parts, tmp_path)
    parts.begins.add(version.id)
    await cleanup.sweep()
    assert exists(version)
    parts.begins.clear()
    parts.used.clear()
    await cleanup.sweep()
    assert not exists(version)


async def test_an_expired_checkpoint_is_removed_once_nobody_samples_it(
    store: Store, parts: Parts, tmp_path: Path
) -> None:
    model = await new_model(store, await journal.new_session(store))
    version = await new_version(store, model, tmp_path / "checkpoints" / "a", durable=True)
    await expired_checkpoint(store, model, version)
    cleanup = cleanup_of(store, parts, tmp_path)
    parts.used.add(version.id)
    await cleanup.sweep()
    assert exists(version)
    parts.used.clear()
    await cleanup.sweep()
    assert names(tmp_path / "checkpoints") == []
    with reading(store) as conn:
        assert checkpoint_records.list_garbage(conn, time.time()) == []
        assert weight_versions.published_version(conn, version.id) is None


async def test_a_directory_is_removed_only_after_nobody_remembers_it(
    store: Store, parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name may be taken again: then it would be removed under the newcomer."""
    model = await new_model(store, await journal.new_session(store))
    version = await new_version(store, model, tmp_path / "checkpoints" / "a", durable=True)
    await expired_checkpoint(store, model, version)
    cleanup = cleanup_of(store, parts, tmp_path)
    full = Mock(side_effect=OperationalError("DELETE", None, OSError("disk full")))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_records, "mark_removed", full)
        await cleanup.sweep()
    assert exists(version)
    await cleanup.sweep()
    assert not exists(version)


class Retained(Storage):
    """Storage that does not let go of some checkpoint."""

    def __init__(self, kept: str) -> None:
        self.kept = kept

    def remove(self, directory: Path) -> None:
        if directory.name == self.kept:
            raise StorageError(f"{directory} is under retention")


async def test_a_checkpoint_that_cannot_be_removed_stops_neither_others_nor_the_purge(
    store: Store, parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await new_model(store, await journal.new_session(store))
    versions = [
        await new_version(store, model, tmp_path / "checkpoints" / name, durable=True) for name in ("a", "b")
    ]
    for version in versions:
        await expired_checkpoint(store, model, version, Path(version.directory).name)
    purged: list[Purge] = []

    async def run_now(purge: Purge) -> bool:
        purged.append(purge)
        return True

    monkeypatch.setattr(Purge, "run_now", run_now)
    await cleanup_of(store, parts, tmp_path, storage=Retained("a")).sweep()
    assert [exists(version) for version in versions] == [True, False]
    assert len(purged) == 1


async def test_checkpoints_that_cannot_be_removed_hold_up_no_others(
    store: Store, parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_records, "AT_ONCE", 2)
    model = await new_model(store, await journal.new_session(store))
    versions = [
        await new_version(store, model, tmp_path / "checkpoints" / name, durable=True) for name in "abcde"
    ]
    for version in versions:
        await expired_checkpoint(store, model, version, Path(version.directory).name)
    storage, left = Retained("b"), []
    cleanup = cleanup_of(store, parts, tmp_path, storage=storage)
    for _ in range(4):
        await cleanup.sweep()
        left.append("".join(sorted(names(tmp_path / "checkpoints"))))
    assert left == ["bcde", "be", "b", "b"]
    storage.kept = ""
    await cleanup.sweep()
    assert names(tmp_path / "checkpoints") == [], "it is tried again"


async def test_when_memory_is_low_all_but_the_newest_ephemeral_weights_move(
    store: Store, parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await new_model(store, await journal.new_session(store))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        versions = [
            await new_version(store, model, Path(memory) / f"v{number}", durable=False)
            for number in (1, 2, 3)
        ]
        spill = TmpfsSpill(Path(memory), tmp_path / "disk", spare=1.0)
        any_part = cast(Any, parts)
        ephemeral = EphemeralVersions(
            store, [any_part], any_part.forget_sources, spill, Settings(home=tmp_path)
        )
        cleanup = Cleanup(store, any_part, any_part, parts.is_loading, ephemeral, Settings(home=tmp_path))
        await cleanup.sweep()
        assert sorted(names(tmp_path / "disk")) == [version.name for version in versions[:-1]]
        assert all(exists(version) for version in versions)
        move, moved = spill.move, list[str]()
        monkeypatch.setattr(spill, "move", lambda version: (moved.append(version.name), move(version))[1])
        await new_version(store, model, Path(memory) / "v4", durable=False)
        await cleanup.sweep()
        assert moved == [versions[-1].name], "the others are not looked at again"


async def test_above_the_cap_the_oldest_ephemeral_weights_go_but_never_the_newest_of_a_model(
    store: Store, parts: Parts, tmp_path: Path
) -> None:
    session = await journal.new_session(store)
    models = [await new_model(store, session), await new_model(store, await journal.new_session(store))]
    versions = []
    for number in range(3):
        for model in models:
            directory = tmp_path / "memory" / f"v{number}-{model.key}"
            versions.append(await new_version(store, model, directory, durable=False, size_bytes=1000))
    spill = TmpfsSpill(tmp_path / "memory", tmp_path / "disk")
    any_part = cast(Any, parts)

    def capped(gb: float) -> EphemeralVersions:
        settings = Settings(home=tmp_path, ephemeral={"gb": gb})
        return EphemeralVersions(store, [any_part], any_part.forget_sources, spill, settings)

    parts.used.add(versions[0].id)
    await capped(4500e-9).sweep()
    kept = await store.read(weight_versions.list_ephemeral_versions)
    assert kept == [versions[0], *versions[3:]]
    assert [exists(version) for version in versions] == [True, False, False, True, True, True]
    await capped(1e-9).sweep()
    assert [exists(version) for version in versions] == [True, False, False, False, True, True]


async def test_a_snapshot_keeps_on_disk_what_clients_sample(
    store: Store, parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await journal.new_session(store)
    model, other = await new_model(store, session), await new_model(store, await journal.new_session(store))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        versions = [
            await new_version(store, model, Path(memory) / f"v{number}", durable=False)
            for number in range(1, 5)
        ]
        await new_version(store, other, Path(memory) / "v5", durable=False)
        parts.idle = {version.id: 3600.0 for version in versions}
        parts.idle[versions[1].id] = 1.0

        def open_client(conn: Connection) -> SamplingSessionId:
            return sampling_sessions.create(
                conn, session, 0, base_model="tiny", model_path=None, version_id=versions[2].id
            )

        sampler = await store.write(open_client)
        await store.write(
            lambda conn: sample_submission.submit_sample(conn, NewSample(sampler, 0, b"", b"", 1, 1, 1), None)
        )
        spill = TmpfsSpill(Path(memory), tmp_path / "disk")
        any_part = cast(Any, parts)
        keeper = EphemeralVersions(store, [any_part], any_part.forget_sources, spill, Settings(home=tmp_path))
        await keeper.keep_sampled(model.key)
        assert sorted(names(tmp_path / "disk")) == ["v2", "v3", "v4"]
        monkeypatch.setattr(weight_versions, "list_awaited_versions", None)  # it reads all waiting samples
        await keeper.keep_sampled(other.key)
        assert "v5" in names(tmp_path / "disk")

"""What a start tidies up, on the real store."""

import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
from sqlalchemy import update
from sqlalchemy.exc import OperationalError

from skyrl_tinker import config
from skyrl_tinker.directories import Directories
from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.ids import ModelState
from skyrl_tinker.domain.values import BaseModelFacts, WeightVersion
from skyrl_tinker.engine import outbox
from skyrl_tinker.engine import start_up as start_up_module
from skyrl_tinker.engine.compose import Environment, _openai_server, make_tmpfs_spill
from skyrl_tinker.engine.ray_cluster import RayCluster
from skyrl_tinker.engine.recovery import parking
from skyrl_tinker.engine.sampler.tmpfs_spill import TmpfsSpill
from skyrl_tinker.engine.sampler.version_files import has_files
from skyrl_tinker.engine.start_up import StartUp
from skyrl_tinker.engine.status import EngineStatus
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.errors import StartupError
from skyrl_tinker.storage.checkpoint_storage import CheckpointStorage
from skyrl_tinker.store import model_records, weight_versions
from skyrl_tinker.store.database.tables import Model
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.store import Store
from skyrl_tinker.system.atomic_directory import staging_of
from skyrl_tinker.training.distributed import MeetingFile
from skyrl_tinker.training.trainer_group import TrainerGroup
from tests.engine.support.world import FACTS
from tests.store.support.rows import create, ephemeral, new_session
from tests.support.failures import failing_first
from tests.support.reads import reading
from tests.support.waiting import PATIENCE_S


def start_up(
    store: Store, bell: Doorbell, home: Path, snapshots: str | None = None
) -> tuple[StartUp, Directories]:
    settings = config.load(home=home, snapshots=snapshots)
    directories = Directories(settings)
    (home / "model").mkdir(parents=True)
    (home / "model" / "config.json").write_text("{}")
    (home / "model" / "model.safetensors").write_bytes(b"")
    facts = BaseModelFacts(str(home / "model"), *[getattr(FACTS, name) for name in FACTS.__slots__[1:]])
    status = EngineStatus(store, bell)
    env = Environment(settings, directories, cast(Any, None), store, bell, status, Metrics())
    return StartUp(env, Bases((facts,)), []), directories


async def test_what_a_dead_engine_left_half_written_goes_and_an_import_that_runs_goes_on(
    store: Store, bell: Doorbell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_up_module, "BaseProcesses", MagicMock())
    starting, directories = start_up(store, bell, tmp_path / "home")
    root = directories.checkpoint_root
    imported = staging_of(root / "import-1" / "weights" / "a")
    saved = staging_of(root / "7" / "weights" / "a~1.ffffffff")
    for directory in (imported, saved, directories.ephemeral_dir):
        directory.mkdir(parents=True)
    met = Path(MeetingFile.make(str(directories.ephemeral_dir)).directory)
    try:
        starting.runtimes()
        meet = Path(MeetingFile.make(str(directories.ephemeral_dir)).directory)  # of ranks that start
        await starting.tidy_up()
        assert [each.exists() for each in (imported, saved, met, meet)] == [True, False, False, True]
    finally:
        directories.delete_outside_home()


async def test_weights_in_memory_are_looked_for_where_this_home_has_them(
    store: Store, bell: Doorbell, tmp_path: Path
) -> None:
    """A home that was moved has another directory in memory."""
    model = await create(store, await new_session(store))
    version = await ephemeral(store, model.key, "/dev/shm/skyrl-tinker-0/another-home/v1")
    starting, directories = start_up(store, bell, tmp_path / "home")
    await starting.tidy_up()
    found = await store.read(lambda conn: weight_versions.published_version(conn, version))
    assert found is not None
    assert found.directory == str(directories.ephemeral_dir / found.name)


def _keep(spill: TmpfsSpill, version: WeightVersion) -> None:
    Path(version.directory).mkdir(parents=True)
    (Path(version.directory) / "adapter_config.json").write_text("{}")
    spill.keep(version)


async def _kept(store: Store, starting: StartUp, directories: Directories, count: int) -> list[WeightVersion]:
    model, spill = await create(store, await new_session(store)), make_tmpfs_spill(starting._env.settings)
    ids = [await ephemeral(store, model.key) for _ in range(count)]
    kept = [WeightVersion(each, "lora", str(directories.ephemeral_dir / f"v{each}")) for each in ids]
    for version in kept:
        _keep(spill, version)
    return kept


async def test_kept_weights_come_back_several_at_once_and_damaged_ones_end_no_start(
    store: Store,
    bell: Doorbell,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As on a host that takes over."""
    starting, directories = start_up(store, bell, tmp_path / "home", f"file://{tmp_path}/stored")
    kept = await _kept(store, starting, directories, 4)
    for directory in (directories.ephemeral_dir, directories.overflow_dir):
        shutil.rmtree(directory)
    (tmp_path / "stored" / "unnamed" / kept[1].name / "adapter_config.json").write_text("other")
    fetch, all_fetch = CheckpointStorage.fetch, threading.Barrier(len(kept), timeout=PATIENCE_S)

    def fetch_beside_others(storage: CheckpointStorage, directory: Path) -> None:
        all_fetch.wait()
        fetch(storage, directory)

    monkeypatch.setattr(CheckpointStorage, "fetch", fetch_beside_others)
    try:
        await starting.tidy_up()
        assert [has_files(version) for version in kept] == [True, False, True, True]
    finally:
        shutil.rmtree(directories.ephemeral_dir, ignore_errors=True)
    assert f"{kept[1].name} could not be brought back" in caplog.text


async def test_kept_weights_that_cannot_be_read_end_no_start(
    store: Store, bell: Doorbell, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a network file system that lost its server: ESTALE; here a file is in the directory's place."""
    starting, directories = start_up(store, bell, tmp_path / "home", None)
    kept = await _kept(store, starting, directories, 2)
    shutil.rmtree(directories.ephemeral_dir)
    shutil.rmtree(directories.overflow_dir / kept[0].name)
    (directories.overflow_dir / kept[0].name).touch()
    try:
        await starting.tidy_up()
        assert [has_files(version) for version in kept] == [False, True]
    finally:
        shutil.rmtree(directories.ephemeral_dir, ignore_errors=True)
    assert f"{kept[0].name} could not be brought back" in caplog.text


async def test_a_full_disk_delays_a_start(
    store: Store, bell: Doorbell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [OperationalError("UPDATE", None, OSError("disk full"))] * 2
    monkeypatch.setattr(parking, "sort_models", failing_first(parking.sort_models, failures))
    monkeypatch.setattr(outbox, "RETRY_S", 0.01)
    starting, _ = start_up(store, bell, tmp_path / "home")
    await starting.tidy_up()
    assert failures == []


async def test_files_of_one_base_model_that_cannot_be_read_end_no_start_of_the_others(
    store: Store, bell: Doorbell, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a network disk that is away: its models wait for it, as it is the one that it was."""
    starting, _ = start_up(store, bell, tmp_path / "home")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
        (tmp_path / name / "model.safetensors").write_text(name)
    facts = [replace(FACTS, names=(name,), directory=str(tmp_path / name)) for name in ("a", "b")]
    starting._bases = Bases(tuple(facts))
    await starting.tidy_up()
    model = await create(store, await new_session(store))
    await store.write(lambda conn: conn.execute(update(Model).values(base_model="b", state=ModelState.READY)))
    index = tmp_path / "b" / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "gone.safetensors"}}')
    await starting.tidy_up()
    shutil.rmtree(tmp_path / "b")
    await starting.tidy_up()
    with reading(store) as conn:
        assert model_records.by_key(conn, model.key).state is ModelState.READY
    assert "the files of base model b cannot be read" in caplog.text


async def test_files_of_a_tokenizer_are_read_once_their_base_model_serves(
    store: Store, tmp_path: Path
) -> None:
    settings, facts = config.load(home=tmp_path), replace(FACTS, directory=str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("{")
    none: Any = SimpleNamespace(settings=settings, facts=facts, fleet=None)
    server = _openai_server(store, Metrics(), none, none, none)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "words"}')
    assert (await server.abilities()).words == {"words"}


class Cluster(RayCluster):
    """Cluster of some GPUs, without Ray."""

    gpus = 4
    address = "127.0.0.1"

    def __init__(self) -> None:
        pass


def test_gpus_are_required_for_those_that_always_run_and_the_largest_on_demand(
    store: Store, bell: Doorbell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def require(*starts: str) -> None:
        own = {"roles": ["train", "sample"], "trainer_ranks": 2}
        bases = {f"base{number}": {**own, "start": start} for number, start in enumerate(starts)}
        settings = config.load(home=tmp_path, device="cuda", placement="separate", bases=bases)
        directories, status = Directories(settings), EngineStatus(store, bell)
        env = Environment(settings, directories, Cluster(), store, bell, status, Metrics())
        served = Bases(tuple(replace(FACTS, names=(name,)) for name in ("first", *bases)))
        StartUp(env, served, [])._require_gpus()

    for starts, told in (
        (("on_demand", "on_demand"), "needs 5 GPUs (1 for trainer ranks, 1 for samplers, 3 for the largest"),
        (("on_demand", "always"), "needs 8 GPUs (3 for trainer ranks, 2 for samplers, 3 for the largest"),
        (("always", "always"), "needs 8 GPUs (5 for trainer ranks, 3 for samplers), found 4"),
    ):
        with pytest.raises(StartupError, match=re.escape(told)):
            require(*starts)
    monkeypatch.setattr(Cluster, "gpus", 5)
    require("on_demand", "on_demand")


@pytest.mark.parametrize(("roles", "expected"), [(["sample"], [0]), (["train", "sample"], [10, 10])])
def test_ranks_start_nicely_where_another_base_model_is_trained(
    store: Store,
    bell: Doorbell,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    roles: list[str],
    expected: list[int],
) -> None:
    monkeypatch.setattr(TrainerGroup, "launch", launch := MagicMock())
    settings = config.load(home=tmp_path, device="cpu", bases={"other": {"roles": roles}})
    directories, status = Directories(settings), EngineStatus(store, bell)
    env = Environment(settings, directories, Cluster(), store, bell, status, Metrics())
    other = replace(FACTS, names=("other",), trainable="train" in roles)
    StartUp(env, Bases((FACTS, other)), []).runtimes()
    assert [call.args[0].start_niceness for call in launch.call_args_list] == expected


async def test_cut_weights_are_refused_by_their_files_name_before_samplers_start(
    store: Store, bell: Doorbell, tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes((500).to_bytes(8, "little") + b'{"a": {')
    settings = config.load(home=tmp_path, device="cpu")
    directories, status = Directories(settings), EngineStatus(store, bell)
    env = Environment(settings, directories, Cluster(), store, bell, status, Metrics())
    facts = replace(FACTS, directory=str(tmp_path), trainable=False)
    (runtime,) = StartUp(env, Bases((facts,)), []).runtimes()
    told = f"'{file}' is not a whole safetensors file: a header of 500 bytes in a file of 15"
    with pytest.raises(StartupError, match=f"^{re.escape(told)}$"):
        await runtime.processes.start(cast(Any, None))

"""What a start tidies up, on the real store."""

from pathlib import Path
from typing import Any, cast

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from skyrl_tinker import config
from skyrl_tinker.directories import Directories
from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.engine import outbox
from skyrl_tinker.engine.compose import Environment
from skyrl_tinker.engine.recovery import parking
from skyrl_tinker.engine.start_up import StartUp
from skyrl_tinker.engine.status import EngineStatus
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.store import sampling_sessions
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.store import Store
from tests.engine.support.world import FACTS
from tests.store.support.rows import create, ephemeral, new_session
from tests.support.reads import reading


def start_up(store: Store, bell: Doorbell, home: Path) -> tuple[StartUp, Directories]:
    settings = config.load(home=home)
    directories = Directories(settings)
    (home / "model").mkdir(parents=True)
    (home / "model" / "config.json").write_text("{}")
    facts = BaseModelFacts(str(home / "model"), *[getattr(FACTS, name) for name in FACTS.__slots__[1:]])
    status = EngineStatus(store, bell)
    env = Environment(settings, directories, cast(Any, None), store, bell, status, Metrics())
    return StartUp(env, facts, []), directories


async def test_weights_in_memory_are_looked_for_where_this_home_has_them(
    store: Store, bell: Doorbell, tmp_path: Path
) -> None:
    """A home that was moved has another directory in memory."""
    model = await create(store, await new_session(store))
    version = await ephemeral(store, model.key, "/dev/shm/skyrl-tinker-0/another-home/v1")
    starting, directories = start_up(store, bell, tmp_path / "home")
    await starting.tidy_up()
    with reading(store) as conn:
        found = sampling_sessions.published_version(conn, version)
    assert found is not None
    assert found.directory == str(directories.ephemeral_dir / found.name)


async def test_a_full_disk_delays_a_start(
    store: Store, bell: Doorbell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = parking.sort_models
    failures = [OperationalError("UPDATE", None, OSError("disk full"))] * 2

    def fails(conn: Connection, fingerprint: str, names: tuple[str, ...]) -> int:
        if failures:
            raise failures.pop()
        return write(conn, fingerprint, names)

    monkeypatch.setattr(parking, "sort_models", fails)
    monkeypatch.setattr(outbox, "RETRY_S", 0.01)
    starting, _ = start_up(store, bell, tmp_path / "home")
    await starting.tidy_up()
    assert failures == []

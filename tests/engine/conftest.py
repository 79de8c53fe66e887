"""A real store and doorbell; the drivers under test run on them."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from skyrl_tinker.engine.outbox import Outbox
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.store.doorbell import Doorbell, SocketBell
from skyrl_tinker.store.store import Store
from tests.engine.support.world import MakeWorld, World
from tests.support.sqlite_file import new_file


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = Store.open(new_file(tmp_path / "store.db"))
    yield opened
    await opened.close()


@pytest.fixture
def bell(tmp_path: Path) -> Iterator[Doorbell]:
    bound = SocketBell.bind(tmp_path, "engine")
    yield bound
    bound.close()


@pytest.fixture
def rung() -> list[str]:
    """Whom the sender has rung."""
    return []


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def sender(store: Store, rung: list[str], metrics: Metrics) -> Outbox:
    return Outbox(store, cast(Doorbell, SimpleNamespace(ring=rung.append)), metrics)


@pytest.fixture
async def make_world(
    store: Store, bell: Doorbell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[MakeWorld]:
    """Start an engine on the store; the options are those of World."""
    made: list[World] = []

    def make(root: Path = tmp_path / "checkpoints", **options: Any) -> World:
        made.append(World(store, bell, root, patch=monkeypatch, **options))
        return made[-1]

    yield make
    for world in made:
        await world.end()


@pytest.fixture
async def world(make_world: MakeWorld) -> World:
    return make_world()

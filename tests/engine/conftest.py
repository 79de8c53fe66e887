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
from tests.engine.support.world import MakeWorld, NewEngine, World
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
async def make_world(store: Store, bell: Doorbell, tmp_path: Path) -> AsyncIterator[MakeWorld]:
    """Start an engine on the store; the options are those of World."""
    made: list[World] = []

    def make(root: Path = tmp_path / "checkpoints", **options: Any) -> World:
        made.append(World(store, bell, root, **options))
        return made[-1]

    yield make
    for world in made:
        await world.end()


@pytest.fixture
def new_engine(make_world: MakeWorld) -> NewEngine:
    """Kill an engine and start another on its journal and its disk."""

    def start(before: World) -> World:
        before.running.cancel()
        return make_world(before.root)

    return start


@pytest.fixture
async def world(make_world: MakeWorld) -> World:
    return make_world()

"""A real store and doorbell; the drivers under test run on them."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from skyrl_tinker.engine.outbox import Outbox
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.store.doorbell import Doorbell, SocketBell
from skyrl_tinker.store.store import Store
from tests.engine.support.world import World
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
async def world(store: Store, bell: Doorbell, tmp_path: Path) -> AsyncIterator[World]:
    made = World(store, bell, tmp_path / "checkpoints")
    yield made
    made.running.cancel()
    with suppress(asyncio.CancelledError, ExceptionGroup):
        await made.running

"""A real store and doorbell; the drivers under test run on them."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.migrate import migrate
from skyrl_tinker.store.store import Store


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    url = f"sqlite+aiosqlite:///{tmp_path / 'store.db'}"
    migrate(url)
    opened = await Store.open(url)
    yield opened
    await opened.close()


@pytest.fixture
def bell(tmp_path: Path) -> Iterator[Doorbell]:
    bound = Doorbell.bind(tmp_path, "engine")
    yield bound
    bound.close()

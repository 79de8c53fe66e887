"""A real, migrated SQLite file, and what most tests stand on."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skyrl_tinker.domain.ids import SamplingSessionId, SessionId
from skyrl_tinker.store.database.migrate import migrate
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.store import Store
from tests.store.support.rows import base_sampler, create, new_session


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"sqlite+aiosqlite:///{tmp_path / 'store.db'}"
    migrate(url)
    return url


@pytest.fixture
async def store(url: str) -> AsyncIterator[Store]:
    store = Store.open(url)
    yield store
    await store.close()


@pytest.fixture
async def session(store: Store) -> SessionId:
    return await new_session(store)


@pytest.fixture
async def model(store: Store, session: SessionId) -> ModelRow:
    return await create(store, session)


@pytest.fixture
async def sampler(store: Store, session: SessionId) -> SamplingSessionId:
    return await base_sampler(store, session)

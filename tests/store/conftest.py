"""A real, migrated database, of SQLite and of PostgreSQL, and what most tests stand on."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from skyrl_tinker.domain.ids import SamplingSessionId, SessionId
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.store import Store
from tests.store.support.rows import base_sampler, create, new_session
from tests.support.postgres import Postgres
from tests.support.sqlite_file import new_file


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield new_file(tmp_path / "store.db")
    else:
        server: Postgres = request.getfixturevalue("postgres")
        url = server.new_database()
        yield url
        server.drop(url)


@pytest.fixture
async def store(url: str, tmp_path: Path) -> AsyncIterator[Store]:
    store = Store.open(url, tmp_path)
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

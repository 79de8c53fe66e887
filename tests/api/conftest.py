from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skyrl_tinker.config import Settings
from skyrl_tinker.server.base_models.tiny_model import make_model
from skyrl_tinker.store.store import Store
from tests.api.support.world import World, new_home, running, settings_for
from tests.support.postgres import Postgres


@pytest.fixture
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    """Settings on SQLite, or on PostgreSQL for a test that is marked ON_BOTH."""
    if getattr(request, "param", "sqlite") == "postgresql":
        (tmp_path / "home").mkdir()
        server: Postgres = request.getfixturevalue("postgres")
        return settings_for(tmp_path / "home", database_url=server.new_database())
    return new_home(tmp_path / "home")


@pytest.fixture
async def store(settings: Settings) -> AsyncIterator[Store]:
    opened = Store.open(settings.store_url)
    yield opened
    await opened.close()


@pytest.fixture
async def world(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    async with running(settings) as made:
        made.patch = monkeypatch
        yield made


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("served") / "model"
    make_model(directory)
    return directory

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skyrl_tinker.config import Settings
from tests.api.support.world import World, running, settings_for
from tests.support.sqlite_file import new_file


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    made = settings_for(tmp_path / "home")
    new_file(made.root / "skyrl-tinker.db")
    return made


@pytest.fixture
async def world(settings: Settings) -> AsyncIterator[World]:
    async with running(settings) as made:
        yield made

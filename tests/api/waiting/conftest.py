from collections.abc import AsyncIterator

import pytest

from skyrl_tinker.config import Settings
from tests.api.support.waiting import Waiting, waiting


@pytest.fixture
async def made(settings: Settings) -> AsyncIterator[Waiting]:
    async with waiting(settings) as world:
        yield world

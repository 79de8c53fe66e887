from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .serve import Serve


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """One for all tests of a module: each leaves it ready."""
    running = Serve(tmp_path_factory.mktemp("healing")).wait_ready()
    yield running
    running.stop()
    running.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Serve]]:
    started: list[Serve] = []

    def start(*options: str) -> Serve:
        started.append(Serve(tmp_path / "home", *options))
        return started[-1]

    yield start
    for each in started:
        each.close()

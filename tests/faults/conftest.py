from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.support.client import Client
from tests.support.serve import Serve, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """One for all tests, of which each leaves it ready. A module that kills its engine often has its own:
    `serve` gives up after five deaths in two minutes.
    """
    with serving(tmp_path_factory.mktemp("shared")) as shared:
        yield shared


@pytest.fixture(autouse=True)
def api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")


@pytest.fixture
def client(server: Serve) -> Iterator[Client]:
    with Client.of(server.url) as client:
        yield client


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Serve]]:
    started: list[Serve] = []

    def start(*options: str) -> Serve:
        started.append(Serve(tmp_path / "home", *options))
        return started[-1]

    yield start
    for each in started:
        each.close()

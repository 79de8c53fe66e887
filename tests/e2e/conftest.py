"""One running server for the whole session: start-up is what costs."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from tests.e2e.support.client import Client

READY = "skyrl-tinker ready: "


class Server:
    """`skyrl-tinker serve` as a user starts it: its own process, a free port, its own home."""

    def __init__(self, home: Path, *arguments: str, python: str = sys.executable) -> None:
        self.home = home
        self.process = subprocess.Popen(
            [
                python,
                "-m",
                "skyrl_tinker",
                "serve",
                "--home",
                str(home),
                "--port",
                "0",
                *arguments,
            ],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd=home.parent,
        )
        self.url = self._wait_for_url()

    def _wait_for_url(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(READY):
                return line.removeprefix(READY).strip()
        raise AssertionError(f"serve ended with {self.process.wait()}; see {self.home}/logs")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=20)


@pytest.fixture(autouse=True, scope="session")
def api_key() -> None:
    os.environ["TINKER_API_KEY"] = "tml-local"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("home"))
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="session")
def service(server: Server) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=server.url) as client:
        yield client


@pytest.fixture(scope="session")
def client(server: Server, service: tinker.ServiceClient) -> Client:
    return Client(server.url, service)


@pytest.fixture(scope="session")
def model_directory(client: Client) -> str:
    """The base model's directory, for plain Hugging Face references."""
    return client.new_lora().get_info().model_data.tokenizer_id

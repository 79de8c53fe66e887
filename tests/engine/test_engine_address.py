"""The engine's HTTP server on an address: for those who know the token."""

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import aiohttp
import pytest

from skyrl_tinker.api.waiting.engine_client import EngineClient, EngineUnavailableError
from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from skyrl_tinker.engine.http_server import EngineHttpServer, OpenAddress
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.errors import StartupError
from skyrl_tinker.protocol.queue_views import QueuesView
from skyrl_tinker.store import server_state
from skyrl_tinker.store.cluster.signing_secrets import ENGINE_HEADER, SigningSecrets, rotate
from skyrl_tinker.store.store import Store


def make(home: Path, address: OpenAddress | None) -> EngineHttpServer:
    directories = Directories(Settings(home=home))
    directories.make()
    queues = cast(QueuesView, None)
    openai, replicas = cast(Any, SimpleNamespace(routes=list)), AsyncMock(return_value=b"")
    socket = directories.engine_socket
    return EngineHttpServer(socket, openai, Metrics(), replicas, lambda: queues, str, 1 << 20, address)


def token_of(home: Path) -> str:
    secrets = SigningSecrets(home)
    secrets.refresh()
    return secrets.current.engine_token


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[EngineHttpServer]:
    home = tmp_path / "home"
    made = make(home, OpenAddress("127.0.0.1", 0, lambda: token_of(home)))
    await made.start()
    yield made
    await made.close()


async def test_who_does_not_know_the_token_is_refused(engine: EngineHttpServer, tmp_path: Path) -> None:
    right = token_of(tmp_path / "home")
    async with aiohttp.ClientSession() as http:
        for shown, status in (
            ({}, 401),
            ({ENGINE_HEADER: "x"}, 401),
            ({ENGINE_HEADER: "ä"}, 401),
            ({ENGINE_HEADER: right}, 200),
        ):
            for path in ("/metrics", "/nothing"):
                async with http.get(f"http://{engine.address}{path}", headers=shown) as answer:
                    assert answer.status == (404 if status == 200 and path == "/nothing" else status)


async def test_the_socket_of_the_home_asks_for_none(engine: EngineHttpServer, tmp_path: Path) -> None:
    socket = Directories(Settings(home=tmp_path / "home")).engine_socket
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket))) as http,
        http.get("http://engine/metrics") as answer,
    ):
        assert answer.status == 200


async def test_an_api_process_finds_it_by_the_store_and_ends_with_its_secrets(
    engine: EngineHttpServer, store: Store, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    secrets = SigningSecrets(home)
    client = EngineClient(tmp_path / "no-socket", store, secrets)
    with pytest.raises(EngineUnavailableError):
        await client.ask("/metrics")
    address = engine.address
    await store.write(lambda conn: server_state.put(conn, server_state.ENGINE_ADDRESS, address))
    assert b"skyrl_tinker" in await client.ask("/metrics")
    rotate(home)
    with pytest.raises(EngineUnavailableError):
        await client.ask("/metrics")
    secrets.refresh()
    assert b"skyrl_tinker" in await client.ask("/metrics")
    await client.close()


async def test_without_a_setting_it_has_no_address(tmp_path: Path) -> None:
    engine = make(tmp_path / "home", None)
    await engine.start()
    assert engine.address is None
    await engine.close()


async def test_an_address_that_is_not_ours_is_one_error(tmp_path: Path) -> None:
    engine = make(tmp_path / "home", OpenAddress("192.0.2.1", 8001, str))
    with pytest.raises(StartupError, match=r"engine_listen: cannot listen on 192\.0\.2\.1:8001"):
        await engine.start()
    await engine.close()


@pytest.mark.parametrize("text", ["8001", ":8001", "host:", "host:x", "host:70000"])
def test_addresses_are_checked(text: str) -> None:
    with pytest.raises(ValueError, match="expected HOST:PORT"):
        Settings(engine_listen=text)


def test_an_address_of_ipv6_is_read() -> None:
    assert Settings(engine_listen="[::1]:8001").engine_address == ("::1", 8001)

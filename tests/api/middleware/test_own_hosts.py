"""What a web page can do to a server without keys: nothing."""

import socket
from pathlib import Path

import pytest

from tests.api.support.users import new_user
from tests.api.support.world import World, new_home, running

BODY = b'{"sdk_version": "0.38.0"}'


async def status(world: World, method: str = "POST", path: str = "create_session", **headers: str) -> int:
    """Status of a request with these headers; `_` in their names stands for `-`."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = await world.http.request(method, path, content=BODY, headers=named)
    if answer.status_code == 403:
        assert answer.headers["content-length"] == str(len(answer.content))
        body = answer.json()
        assert ": found " in (body["error"]["message"] if "/oai/" in path else body["detail"])
    return answer.status_code


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8000",
        "127.0.0.1:8000",
        "[::1]:8000",
        "192.168.1.5",
        socket.gethostname(),
        "api",
    ],
)
async def test_own_names_addresses_and_allowed_hosts_are_served(world: World, host: str) -> None:
    assert await status(world, Host=host) == 200


@pytest.mark.parametrize(
    "host", ["evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "", "[evil]", "1.2.3"]
)
@pytest.mark.parametrize("path", ["create_session", "/healthz", "/metrics", "/docs", "/oai/api/v1/models"])
async def test_a_name_that_resolves_here_is_refused_everywhere(world: World, host: str, path: str) -> None:
    target = path if path == "create_session" else f"http://api{path}"
    assert await status(world, "POST" if path == "create_session" else "GET", target, Host=host) == 403


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:3000", "http://[", ""])
async def test_another_page_cannot_post(world: World, origin: str) -> None:
    assert await status(world, Origin=origin, Host="localhost:8000", Content_Type="text/plain") == 403


async def test_its_own_pages_and_those_of_allowed_hosts_can(world: World) -> None:
    assert await status(world, Origin="http://localhost:8000", Host="localhost:8000") == 200
    assert await status(world, Origin="https://api", Host="localhost:8000") == 200
    assert await status(world, Sec_Fetch_Site="same-origin") == 200
    assert await status(world, Sec_Fetch_Site="none") == 200


async def test_a_page_without_an_origin_is_told_by_its_fetch_metadata(world: World) -> None:
    """Images and forms of method GET send no Origin; links that a user follows do no harm."""
    picture = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"}
    link = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}
    assert await status(world, "GET", "http://api/docs", **picture) == 403
    assert await status(world, "GET", "http://api/docs", **link) == 200
    assert await status(world, "POST", **link) == 403


async def test_no_secret_is_repeated(world: World) -> None:
    """As when a key was put where the URL belongs."""
    secret = "tml-" + "a" * 43
    for headers in ({"Host": secret}, {"Host": "localhost", "Origin": secret}):
        answer = await world.http.post("create_session", content=BODY, headers=headers)
        assert answer.status_code == 403
        assert "[secret]" in answer.text


async def test_keys_take_the_place_of_the_check(world: World) -> None:
    key = await new_user(world, "alice")
    assert await status(world, Host="tinker.example", X_API_Key=key) == 200
    assert await status(world, Host="tinker.example") == 401


async def test_an_allowed_host_may_look_like_a_key(tmp_path: Path) -> None:
    host = "TML-gpu-cluster-node-17.lab"
    async with running(new_home(tmp_path / "home", allowed_hosts=(host.lower(),))) as world:
        assert await status(world, Host=host, Origin=f"https://{host}") == 200
        assert await status(world, Host=host.lower(), Origin=f"https://{host.lower()}") == 200


async def test_any_host_can_be_allowed(tmp_path: Path) -> None:
    async with running(new_home(tmp_path / "home", allowed_hosts=("*",))) as world:
        assert await status(world, Host="tinker.example", Origin="https://page.example") == 200

"""The middleware of vLLM's server by which versions of another host become paths of this one."""

import asyncio
import json
from collections.abc import AsyncIterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest

from skyrl_tinker.inference.constants import PROBE
from skyrl_tinker.inference.servers.version_server import VersionServer
from skyrl_tinker.inference.vllm.plugin.middlewares import VersionPull
from skyrl_tinker.system import version_copies
from skyrl_tinker.system.interfaces import address_towards

ELSEWHERE = "http://192.0.2.9:8000"
"""On a host that does not exist (RFC 5737)."""

pytestmark = pytest.mark.skipif(
    address_towards("http://127.0.0.1") is not None or address_towards(ELSEWHERE) is None,
    reason="this machine has no network interface but loopback",
)


class Server:
    """An ASGI application behind the middleware, which keeps what it is asked."""

    def __init__(self) -> None:
        self.pull = VersionPull(self)
        self.asked: list[Any] = []

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        assert dict(scope["headers"])[b"content-length"] == str(len(body)).encode()
        self.asked.append(json.loads(body or b"null"))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    async def post(self, path: str, message: Any = None) -> tuple[int, bytes]:
        body = b"" if message is None else json.dumps(message).encode()
        parts = [body[:7], body[7:]]  # as a network may cut it
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            part = parts.pop(0)
            return (
                {"type": "http.request", "body": part, "more_body": bool(parts)} if message else {"body": b""}
            )

        async def send(part: Any) -> None:
            sent.append(part)

        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self.pull({"type": "http", "path": path, "headers": headers}, receive, send)
        return sent[0]["status"], sent[1]["body"]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(version_copies, "_SHM", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    return Server()


@pytest.fixture
async def urls(tmp_path: Path) -> AsyncIterator[list[str]]:
    versions = VersionServer("/models/base")
    for name in ("v1", "v2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(name)
    yield [await versions.locate(ELSEWHERE, str(tmp_path / name)) for name in ("v1", "v2")]
    await versions.close()


async def test_an_adapter_is_loaded_from_a_copy_until_it_is_unloaded(server: Server, urls: list[str]) -> None:
    for name, url in zip(("one", "two"), urls, strict=True):
        await server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": url})
    copies = [Path(each["lora_path"]) for each in server.asked]
    assert [(copy / "model.safetensors").read_text() for copy in copies] == ["v1", "v2"]
    await server.post("/v1/unload_lora_adapter", {"lora_name": "one"})
    assert [copy.exists() for copy in copies] == [False, True]
    assert server.asked[-1] == {"lora_name": "one"}


@pytest.mark.parametrize("ending", ["/finish_weight_update", "/start_weight_update"])
async def test_full_weights_stay_until_the_update_is_over(
    server: Server, urls: list[str], ending: str
) -> None:
    for part in range(2):
        await server.post("/update_weights", {"update_info": {"directory": urls[0], "names": [part]}})
    first, second = (each["update_info"] for each in server.asked)
    assert first["directory"] == second["directory"]
    assert _is_there(first)
    await server.post(ending)
    assert not _is_there(first)


def _is_there(update: Any) -> bool:
    return Path(update["directory"]).is_dir()


async def test_what_cannot_be_pulled_is_refused_and_not_passed_on(server: Server, urls: list[str]) -> None:
    gone = urls[0].replace("v1", "v3")
    status, text = await server.post("/v1/load_lora_adapter", {"lora_name": "one", "lora_path": gone})
    assert (status, server.asked) == (502, [])
    assert b"could not be pulled: HTTP Error 404" in text


async def test_paths_and_other_requests_pass_as_they_are(server: Server, tmp_path: Path) -> None:
    messages = [{"lora_name": "one", "lora_path": str(tmp_path)}, {"update_info": {"discard": True}}]
    await server.post("/v1/load_lora_adapter", messages[0])
    await server.post("/update_weights", messages[1])
    assert server.asked == messages
    status, _ = await server.post(PROBE)
    assert (status, server.asked) == (204, messages)


async def test_two_at_once_pull_once(server: Server, urls: list[str]) -> None:
    message = {"update_info": {"directory": urls[1]}}
    await asyncio.gather(*(server.post("/update_weights", message) for _ in range(4)))
    assert len({each["update_info"]["directory"] for each in server.asked}) == 1

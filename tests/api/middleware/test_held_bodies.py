"""Many large bodies at one API process: what it holds is bounded, and connections outlive refusals."""

import asyncio
import http.client
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import zstandard

from skyrl_tinker.domain.units import MiB
from tests.api.support.process import Api, launched_on
from tests.api.support.world import write_facts

WIRE, EXPANDED, HELD = 4, 16, 16
AT_ONCE = 60
PROTOBUF = {"Content-Type": "application/x-protobuf"}


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    bodies = {"wire_mb": WIRE, "expanded_mb": EXPANDED, "held_mb": HELD}
    with launched_on(tmp_path / "home", write_facts, bodies=bodies) as (made, _):
        yield made


def most_memory_mb(api: Api) -> float:
    """Since the process began."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{api.process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


async def send_at_once(api: Api, body: bytes, **headers: str) -> list[int]:
    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None)) as client:
        url = f"{api.url}/api/v1/forward_backward"
        sent = (client.post(url, content=body, headers=PROTOBUF | headers) for _ in range(AT_ONCE))
        return [answer.status_code for answer in await asyncio.gather(*sent)]


async def test_many_large_bodies_cost_no_more_than_what_may_be_held(api: Api) -> None:
    before = most_memory_mb(api)
    assert set(await send_at_once(api, b"\xff" * (WIRE * MiB))) == {400}
    assert most_memory_mb(api) < before + 100, f"{AT_ONCE} x {WIRE} MiB came at once"


async def test_many_bombs_cost_no_more_than_what_may_be_held(api: Api) -> None:
    """Send frames without a content size that expand to the cap, or to just over it."""
    before = most_memory_mb(api)
    for size, status in ((EXPANDED * MiB, 400), (EXPANDED * MiB + 1, 413)):
        frame = zstandard.ZstdCompressor().compressobj()
        bomb = frame.compress(b"\xff" * size) + frame.flush()
        statuses = await send_at_once(api, bomb, **{"Content-Encoding": "zstd"})
        assert set(statuses) == {status}
    assert most_memory_mb(api) < before + 150, f"{AT_ONCE} x {EXPANDED} MiB were asked for"


async def test_a_message_of_very_many_empty_ones_is_refused_before_it_is_parsed(api: Api) -> None:
    """Two bytes each, fifty once they are parsed."""
    before = most_memory_mb(api)
    frame = zstandard.ZstdCompressor().compress(b"\x1a\x00" * (EXPANDED * MiB // 2))
    async with httpx.AsyncClient(timeout=None) as client:
        url = f"{api.url}/api/v1/forward_backward"
        answer = await client.post(url, content=frame, headers=PROTOBUF | {"Content-Encoding": "zstd"})
    assert answer.status_code == 413
    assert "protobuf fields" in answer.json()["detail"]
    assert most_memory_mb(api) < before + 100


@pytest.mark.parametrize("announced", [True, False])
def test_a_connection_outlives_a_refused_body(api: Api, announced: bool) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", api.settings.port)
    connection.connect()
    opened = connection.sock
    pieces = [bytes(MiB)] * (WIRE + 1)
    headers = {"Content-Length": str((WIRE + 1) * MiB)} if announced else {}
    for _ in range(2):
        connection.request("POST", "/api/v1/optim_step", iter(pieces), headers, encode_chunked=not announced)
        refused = connection.getresponse()
        assert refused.status == 413
        assert int(refused.headers["Content-Length"]) == len(refused.read())
        connection.request("GET", "/healthz")
        assert connection.getresponse().read() == b'{"status":"ok"}'
        assert connection.sock is opened
    connection.close()


async def test_what_leaves_in_the_middle_of_its_body_gives_its_room_back(api: Api) -> None:
    async def torn() -> AsyncIterator[bytes]:
        yield bytes(MiB)
        raise ConnectionAbortedError

    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None)) as client:
        url = f"{api.url}/api/v1/forward_backward"
        headers = PROTOBUF | {"Content-Length": str(WIRE * MiB)}
        for _ in range(3 * HELD // WIRE):
            with pytest.raises(ConnectionAbortedError):
                await client.post(url, content=torn(), headers=headers)
        whole = await client.post(url, content=b"\xff" * (WIRE * MiB), headers=PROTOBUF)
    assert whole.status_code == 400

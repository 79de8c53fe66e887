"""Bodies: bounded on the wire and after decompression, refused with a Content-Length."""

import gzip
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
import zstandard

from skyrl_tinker.api.compression import decompress
from skyrl_tinker.api.json_text import parse_json
from skyrl_tinker.api.limits import BodyLimitMiddleware, BodyLimits
from skyrl_tinker.errors import TooLargeError, UserError

from .world import World

CAP = 1 << 20


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


@pytest.mark.parametrize(("encoding", "compress"), [("zstd", zstd), ("gzip", gzip.compress)])
async def test_compressed_bodies_are_read(
    world: World, encoding: str, compress: Callable[[bytes], bytes]
) -> None:
    body = compress(b'{"sdk_version": "0.38.0"}')
    answer = await world.http.post("create_session", content=body, headers={"Content-Encoding": encoding})
    assert answer.status_code == 200


@pytest.mark.parametrize(("encoding", "compress"), [("zstd", zstd), ("gzip", gzip.compress)])
def test_a_bomb_costs_no_more_than_the_cap(encoding: str, compress: Callable[[bytes], bytes]) -> None:
    bomb = compress(bytes(64 * CAP))
    assert len(bomb) < CAP / 8
    with pytest.raises(TooLargeError, match=f"{len(bomb)} bytes of {encoding}.*more than {CAP}"):
        decompress(bomb, encoding, CAP)


@pytest.mark.parametrize(("encoding", "compress"), [("zstd", zstd), ("gzip", gzip.compress)])
def test_a_body_that_just_fits_comes_back_whole(encoding: str, compress: Callable[[bytes], bytes]) -> None:
    data = bytes(range(256)) * (CAP // 256)
    assert decompress(compress(data), encoding, CAP) == data


@pytest.mark.parametrize(("encoding", "compress"), [("zstd", zstd), ("gzip", gzip.compress)])
def test_a_torn_or_padded_body_is_refused(encoding: str, compress: Callable[[bytes], bytes]) -> None:
    whole = compress(b"some data " * 1000)
    for wrong in (whole[:-6], whole + b"more", b"not compressed", b""):
        with pytest.raises(UserError, match=encoding):
            decompress(wrong, encoding, CAP)


async def test_an_unknown_encoding_is_refused(world: World) -> None:
    answer = await world.http.post("create_session", content=b"{}", headers={"Content-Encoding": "br"})
    assert answer.status_code == 400
    assert "'br'" in answer.json()["detail"]


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_over_the_wire_cap_is_413_with_both_sizes(announced: bool) -> None:
    async def app(scope: object, receive: object, send: object) -> None:
        raise AssertionError("a refused body must not get through")

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield bytes(100)

    limited = BodyLimitMiddleware(app, BodyLimits(wire=1000, expanded=1000, held=1000))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(limited), base_url="http://api") as http:
        answer = await http.post("/", content=bytes(2000) if announced else pieces())
    assert answer.status_code == 413
    assert "1000" in answer.json()["detail"]
    assert ("2000" in answer.json()["detail"]) == announced
    assert int(answer.headers["content-length"]) > 0


def test_json_nests_up_to_64_levels() -> None:
    parse_json(b"[" * 64 + b"]" * 64)
    parse_json(rb'{"text": "[[[\"[[[' + b"[{" * 100 + b'"}')
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        nested = opening * 65 + b"1" + closing * 65
        with pytest.raises(UserError, match="nested deeper than 64"):
            parse_json(nested)
    with pytest.raises(UserError, match="not valid JSON"):
        parse_json(b"[" * 100_000)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"{", "JSON"),
        (b"[]", "object"),
        (b"", "JSON"),
        (b'{"session_id": NaN}', "JSON"),
        (b'{"session_id": 5}', "session_id"),
        (b"{}", "session_id"),
    ],
)
async def test_a_bad_body_is_400_with_a_content_length_and_names_the_field(
    world: World, body: bytes, named: str
) -> None:
    answer = await world.http.post("session_heartbeat", content=body)
    assert answer.status_code == 400
    assert int(answer.headers["content-length"]) > 0
    assert named in answer.json()["detail"]

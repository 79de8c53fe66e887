"""Bodies: bounded on the wire and after decompression, refused with a Content-Length."""

import asyncio
import gzip
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import orjson
import pytest
import zstandard
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from skyrl_tinker.api.middleware import arriving_body
from skyrl_tinker.api.middleware.body_limits import BodyLimitMiddleware, BodyLimits
from skyrl_tinker.api.middleware.byte_budget import ByteBudget, Share
from skyrl_tinker.api.middleware.compression import decompress, most_expanded
from skyrl_tinker.api.requests.request_body import MAX_ITEMS, MAX_OBJECTS, json_object, parse_json
from skyrl_tinker.domain.ids import OwnerId
from skyrl_tinker.errors import TooLargeError, UserError
from skyrl_tinker.protocol.protobuf.pass_results import PROTOBUF
from tests.api.support.world import World
from tests.engine.support.simulation import simulate
from tests.support.loop_time import skip

CAP = 1 << 20
CHATS = "/oai/api/v1/chat/completions"


async def never_called(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("a refused body must not get through")


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    await Response((await receive())["body"])(scope, receive, send)


async def length(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse(str(len((await receive())["body"])))(scope, receive, send)


def client_of(app: ASGIApp, spool: Path) -> httpx.AsyncClient:
    """Client of an app behind the layer, with X-API-Key in place of the owner."""
    limited = BodyLimitMiddleware(app, BodyLimits(wire=CAP, expanded=CAP, json=CAP, held=CAP), spool)

    async def owned(scope: Scope, receive: Receive, send: Send) -> None:
        key = Headers(scope=scope).get("x-api-key")
        await limited({**scope, "owner": key}, receive, send)

    return httpx.AsyncClient(transport=httpx.ASGITransport(owned), base_url="http://api")


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
async def test_a_body_over_the_wire_cap_is_413_with_both_sizes(announced: bool, tmp_path: Path) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield bytes(100)

    limited = BodyLimitMiddleware(
        never_called, BodyLimits(wire=1000, expanded=1000, json=1000, held=1000), tmp_path
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(limited), base_url="http://api") as http:
        answer = await http.post("/", content=bytes(2000) if announced else pieces())
    assert answer.status_code == 413
    assert "1000" in answer.json()["detail"]
    assert ("2000" in answer.json()["detail"]) == announced
    assert int(answer.headers["content-length"]) > 0


@pytest.mark.parametrize("compressed", [False, True])
async def test_other_bodies_than_protobuf_have_a_lower_cap(compressed: bool, tmp_path: Path) -> None:
    limits = BodyLimits(wire=3000, expanded=3000, json=1000, held=3000)
    body, headers = (zstd(bytes(2000)), {"Content-Encoding": "zstd"}) if compressed else (bytes(2000), {})
    transport = httpx.ASGITransport(BodyLimitMiddleware(length, limits, tmp_path))
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as http:
        passed = await http.post("/", content=body, headers={"Content-Type": PROTOBUF, **headers})
        refused = await http.post("/", content=body, headers={"Content-Type": "application/json", **headers})
    assert (passed.text, refused.status_code) == ("2000", 413)
    assert ("the cap" if compressed else "bodies.json_mb") in refused.json()["detail"]


def test_json_nests_up_to_64_levels() -> None:
    parse_json(b"[" * 64 + b"]" * 64)
    parse_json(rb'{"text": "[[[\"[[[' + b"[{" * 100 + b'"}')
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        nested = opening * 65 + b"1" + closing * 65
        with pytest.raises(UserError, match="nested deeper than 64"):
            parse_json(nested)
    with pytest.raises(UserError, match="not valid JSON"):
        parse_json(b"[" * 100_000)


def test_numbers_are_read_as_they_are() -> None:
    """Long ones are read again, and no other value changes by that."""
    text = rb'{"a": 18446744073709551617, "b": [0.00012345678901234567, -0.0, 1e20, "\n", null], "c\"": 1}'
    floats = json_object(text, exact=False)
    assert repr(floats["a"]) == repr(2.0**64)
    assert repr(json_object(text)) == repr({**floats, "a": 2**64 + 1})


def grown_kb(expression: str) -> int:
    """Return by how much the memory of a new process grows at most while it evaluates the expression."""
    script = f"""
import resource
from skyrl_tinker.api.requests.request_body import json_object, parse_json
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
{expression}
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    return int(subprocess.check_output([sys.executable, "-c", script]))


def test_escapes_in_strings_cost_no_memory() -> None:
    """A backtracking pattern took 57 bytes for each byte of escapes."""
    grown = grown_kb(r"""parse_json(b'{"a": "' + b"\\n" * 2_000_000 + b'"}')""")
    assert grown < 64 * 1024  # the body, its copies and the parsed value


def test_a_body_that_is_read_again_is_held_once() -> None:
    """One with a long number, whose lists would take 80 MB twice."""
    body = """b'{"a": [' + b"[1.5]," * 900_000 + b"%d]}" """
    once, again = (grown_kb(f"json_object({body % number})") for number in (1, 2**64))
    assert again - once < 40 * 1024


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


def test_a_zstd_frame_of_unknown_size_is_read() -> None:
    stream = zstandard.ZstdCompressor().compressobj()
    data = bytes(range(256)) * 1000
    assert decompress(stream.compress(data) + stream.flush(), "zstd", CAP) == data


@pytest.mark.parametrize(("encoding", "compress"), [("zstd", zstd), ("gzip", gzip.compress)])
def test_several_frames_are_refused(encoding: str, compress: Callable[[bytes], bytes]) -> None:
    with pytest.raises(UserError, match="exactly one complete"):
        decompress(compress(b"one") + compress(b"two"), encoding, CAP)


def test_a_zstd_window_of_gigabytes_is_refused() -> None:
    """Window_Descriptor 0xA8 is 2 GiB (RFC 8878, 3.1.1.1.2); then an empty last block."""
    for descriptor, allowed in ((0xA8, False), (0x88, True)):
        frame = b"\x28\xb5\x2f\xfd\x00" + bytes([descriptor]) + b"\x01\x00\x00"
        if allowed:
            assert decompress(frame, "zstd", CAP) == b""
        else:
            with pytest.raises(UserError, match="zstd"):
                decompress(frame, "zstd", CAP)


def test_how_much_a_body_may_become_is_known_before() -> None:
    assert most_expanded(zstd(bytes(CAP)), "zstd") == CAP
    assert most_expanded(gzip.compress(bytes(CAP)), "gzip") >= CAP


def test_json_of_too_many_values_is_refused_before_it_is_parsed() -> None:
    parse_json(b"[" + b"1," * 10_000 + b"1]")
    for part, named in ((b"[],", "brackets"), (b"1,", "commas"), (b'"",', "quotes"), (b"{},", "brackets")):
        with pytest.raises(TooLargeError, match=f"found .*{named}.*, expected at most"):
            parse_json(b"[" + part * (MAX_ITEMS + (named == "commas")) + b"1]")


def test_json_of_many_objects_is_refused_before_it_is_validated() -> None:
    """Each part of a prompt is one; brackets within a text are none."""

    def prompt(parts: int, text: str) -> bytes:
        return orjson.dumps({"text": text, "chunks": [{"tokens": [1]}] * parts})

    text = '{"a\\": ' * (MAX_OBJECTS + 1)
    assert parse_json(prompt(MAX_OBJECTS - 1, text))
    with pytest.raises(TooLargeError, match=f"found {MAX_OBJECTS + 1} objects, expected at most"):
        parse_json(prompt(MAX_OBJECTS, text))


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"session_id": "a", "session_id": "b"}', 404),  # the last one counts
        (b'{"session_id": "a\\u0000b"}', 400),
        (b'{"session_id": "\\ud800"}', 400),
        (b'{"session_id": "\xff\xfe"}', 400),
        (b'{"session_id": "\xed\xa0\x80"}', 400),
        (b'{"session_id": "a", "more": ' + b"9" * 200 + b"}", 404),
        (b'{"session_id": "a", "more": ' + b"9" * 5000 + b"}", 400),
        (b'{"session_id": "a", "more": 1e999}', 400),
        (b'{"session_id": ' + b"9" * 400 + b"}", 400),
        (b'\xef\xbb\xbf{"session_id": "a"}', 400),
    ],
)
async def test_odd_json_is_answered(world: World, body: bytes, status: int) -> None:
    answer = await world.http.post("session_heartbeat", content=body)
    assert answer.status_code == status, answer.text
    assert int(answer.headers["content-length"]) > 0


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "nothing", 404), ("DELETE", "create_session", 405), ("GET", "checkpoints?limit=x", 400)],
)
async def test_what_the_framework_refuses_has_a_content_length(
    world: World, method: str, path: str, status: int
) -> None:
    answer = await world.http.request(method, path)
    assert answer.status_code == status
    assert int(answer.headers["content-length"]) > 0
    assert isinstance(answer.json()["detail"], str)


async def test_large_bodies_wait_for_each_other_and_small_ones_do_not(tmp_path: Path) -> None:
    inside, release = asyncio.Semaphore(0), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        if scope["path"] == "/large":
            inside.release()
            await release.wait()
        await PlainTextResponse("done")(scope, receive, send)

    limited = BodyLimitMiddleware(app, BodyLimits(wire=CAP, expanded=CAP, json=CAP, held=2 * CAP), tmp_path)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(limited), base_url="http://api") as http:
        body = bytes(1 << 20)
        waiting = [asyncio.create_task(http.post("/large", content=body)) for _ in range(5)]
        await inside.acquire()
        await inside.acquire()
        assert (await http.post("/small", content=b"x")).text == "done"
        waiting[2].cancel()  # one of those that wait
        assert inside.locked(), "a third one is held"
        release.set()
        answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert sum(isinstance(answer, httpx.Response) for answer in answers) == 4


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
async def test_large_bodies_that_wait_for_samplers_hold_up_no_others(encoding: str, tmp_path: Path) -> None:
    """Chats for a base model that starts are held for minutes."""
    inside, release = asyncio.Semaphore(0), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        if scope["path"] == CHATS:
            inside.release()
            await release.wait()
        await PlainTextResponse("done")(scope, receive, send)

    limited = BodyLimitMiddleware(app, BodyLimits(wire=CAP, expanded=CAP, json=CAP, held=2 * CAP), tmp_path)
    body = os.urandom(CAP - 4096)
    sent = body if encoding == "identity" else gzip.compress(body, 1)
    headers = {"Content-Encoding": encoding}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(limited), base_url="http://api") as http:
        chats = [asyncio.create_task(http.post(CHATS, content=sent, headers=headers)) for _ in range(3)]
        await inside.acquire()
        await inside.acquire()
        assert (await asyncio.wait_for(http.post("/pass", content=sent, headers=headers), 60)).text == "done"
        assert inside.locked(), "a third chat is held"
        release.set()
        await asyncio.gather(*chats)


@pytest.mark.parametrize("size", [1, CAP // 2])
async def test_a_body_that_does_not_come_is_408(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arriving_body, "GRACE_S", 0.1)

    async def slow() -> AsyncIterator[bytes]:
        yield bytes(size)
        await asyncio.Event().wait()

    async with client_of(never_called, tmp_path) as http:
        answer = await http.post("/", content=slow())
    assert answer.status_code == 408
    assert f"found {size} bytes and then too little" in answer.json()["detail"]


async def test_a_slow_body_may_go_on_at_the_least_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arriving_body, "GRACE_S", 3000.0)
    monkeypatch.setattr(arriving_body, "STRIDE", 1000)
    monkeypatch.setattr(arriving_body, "STRIDE_S", 2000.0)

    async def slow() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield bytes(1000)
            skip(1000)
            await asyncio.sleep(0)

    async with client_of(length, tmp_path) as http:
        assert (await http.post("/", content=slow())).text == "5000"


async def test_slow_bodies_hold_nothing_that_others_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fills the memory for arriving bodies makes others go through files, whole and equal."""
    monkeypatch.setattr(arriving_body, "MEMORY", 2 * CAP)
    stop, arrived = asyncio.Event(), asyncio.Semaphore(0)
    sent = random.Random(3).randbytes(CAP)

    async def slow() -> AsyncIterator[bytes]:
        yield sent[: CAP - 1]
        arrived.release()
        await stop.wait()
        yield sent[CAP - 1 :]

    async with client_of(echo, tmp_path) as http:
        slow_ones = [asyncio.create_task(http.post("/", content=slow())) for _ in range(8)]
        for _ in slow_ones:
            await arrived.acquire()
        assert (await http.post("/", content=sent)).content == sent
        stop.set()
        assert all(answer.content == sent for answer in await asyncio.gather(*slow_ones))


async def test_one_owner_cannot_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arriving_body, "MEMORY", 0)
    monkeypatch.setattr(arriving_body, "OWNER_FILES", CAP)
    arrived = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield bytes(CAP // 2)
        arrived.set()
        await asyncio.Event().wait()

    async with client_of(length, tmp_path) as http:
        waiting = asyncio.create_task(http.post("/", content=slow()))
        await arrived.wait()
        refused = await http.post("/", content=bytes(CAP * 3 // 4))
        other = await http.post("/", content=bytes(CAP * 3 // 4), headers={"X-API-Key": "7"})
        waiting.cancel()
    assert (refused.status_code, other.text) == (429, str(CAP * 3 // 4))
    assert "of this owner's bodies arrive at once" in refused.json()["detail"]


async def test_owners_take_turns_for_the_budget() -> None:
    budget, order, waiting = ByteBudget(2), list[int](), list[asyncio.Task[None]]()
    gate = asyncio.Event()

    async def use(owner: int) -> None:
        async with budget.holding(1, OwnerId(owner)):
            order.append(owner)
            await gate.wait()

    for owner in (1, 2, 1, 1, 1, 2, 2):
        waiting.append(asyncio.create_task(use(owner)))
    await asyncio.sleep(0)
    assert order == [1, 2]
    gate.set()
    await asyncio.gather(*waiting)
    assert order == [1, 2, 1, 2, 1, 2, 1]


async def test_nobody_waits_for_what_others_hold_however_long() -> None:
    budget = ByteBudget(100)
    async with budget.holding(100, OwnerId(1)):
        more = asyncio.create_task(budget.holding(1, OwnerId(1)).__aenter__())
        async with asyncio.timeout(60), budget.holding(60, OwnerId(2)):
            second = asyncio.create_task(budget.holding(40, OwnerId(2)).__aenter__())
            await asyncio.sleep(0)
            assert not more.done()
            assert not second.done()
    await asyncio.wait_for(asyncio.gather(more, second), 60)


class CountedOwner(int):
    """Owner whose look-ups are counted, of all such owners together."""

    looks = 0

    def __hash__(self) -> int:
        CountedOwner.looks += 1
        return super().__hash__()


async def test_bytes_are_given_and_taken_without_a_look_at_all_owners_that_wait() -> None:
    budget, owners = ByteBudget(100), [OwnerId(CountedOwner(number)) for number in range(200)]
    async with AsyncExitStack() as held:
        for owner in owners:
            await held.enter_async_context(budget.holding(1, owner))
        waiting = [asyncio.create_task(budget.holding(100, owner).__aenter__()) for owner in owners]
        await asyncio.sleep(0)
        CountedOwner.looks = 0
        async with budget.holding(1, OwnerId(CountedOwner(-1))) as share:
            budget.shrink(share, 0)
        assert 0 < CountedOwner.looks < 50
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)


@pytest.mark.parametrize("owners", [1, 3])
def test_a_budget_is_given_out_in_turn_and_comes_back_whole(owners: int) -> None:
    """Whatever is cancelled, whenever: all get a turn, nothing is lost, and each has one at most beyond."""
    simulate(_give_out(owners))


async def _give_out(owners: int) -> None:
    source, budget = random.Random(1), ByteBudget(100)
    live: dict[int, Share] = {}
    totals = [0]

    async def use(size: int) -> None:
        async with budget.holding(size, OwnerId(size % owners)) as share:
            live[id(share)] = share
            totals.append(sum(each.size for each in live.values()))
            try:
                await asyncio.sleep(source.random() / 1000)
                budget.shrink(share, share.size // 2)
                await asyncio.sleep(source.random() / 1000)
            finally:
                del live[id(share)]

    tasks = [asyncio.create_task(use(source.randint(1, 150))) for _ in range(500)]
    for task in source.sample(tasks, 100):
        await asyncio.sleep(0.0005)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert 90 < max(totals) <= 100 * owners
    async with budget.holding(100, None) as share:
        assert share.size == 100

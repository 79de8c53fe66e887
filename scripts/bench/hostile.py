#!/usr/bin/env python3
"""What strangers and hostile tenants cost the API: its memory, and the answers that a neighbour waits for.

usage: scripts/bench/hostile.py [--attacks A,B] [--hold S]

Each attack meets a fresh API process on a real store; no engine and no model is behind it. Most attack a
server with keys, without a key where the name says stranger; the foreign ones attack a server without keys.
The attacker is a process of its own at 127.0.0.2; meanwhile a neighbour at 127.0.0.1 sends every half second
a heartbeat and a forward_backward of 400 KB, and waits 10 s at most for either. What an attack holds open it
holds for --hold seconds (20).

Peak: the most memory (VmHWM) during the attack, over that (RSS) of the idle API just before it.
Answers of the attacker: a status; closed: the server closed the connection without one; open: neither.

With the default arguments it ends within five minutes. Prints a table and, as its last line, one JSON object:
worst_mb: the highest peak; neighbours_failed: requests without an answer; missed: the bars that were not held
(peaks of 120 MB, a neighbour that was not answered, an attacker who got what no one should), which make the
exit code 1; and all figures of the table.
"""

import asyncio
import itertools
import multiprocessing
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import aiohttp
import zstandard
from ingest import body_name, random_data
from serving import chosen, judged, options_of, run_when_idle

from skyrl_tinker.server import preflight
from skyrl_tinker.store import server_state
from skyrl_tinker.store.database.migrate import migrate
from skyrl_tinker.store.store import Store
from tests.api.support.process import Api, launched
from tests.api.support.world import BASE, settings_for, write_facts

MB = 10**6
MOST_MB = 120.0
NEIGHBOUR, ATTACKER = "127.0.0.1", "127.0.0.2"
EVERY_S, ANSWER_S, ATTACK_S = 0.5, 10.0, 120.0
PIECE = 1 << 18
LARGE = PIECE + 1
"""Bytes of a body that waits for a share of the API's memory."""
PROTOBUF = {"Content_Type": "application/x-protobuf"}
PASS = "/api/v1/forward_backward"
SESSION = "/api/v1/create_session"
OPEN, CLOSED = "open", "closed"
Answers = Counter[str]
Json = dict[str, Any]
DATA = bytes(random_data(1, 20_000))


# The attacker


@dataclass(frozen=True)
class Door:
    """The API as an attacker sees it. `key`: None on a server without keys. `model_id`: one of its own."""

    port: int
    key: str | None
    model_id: str
    hold_s: float

    def head(self, path: str, method: str = "POST", **headers: str | int) -> bytes:
        """Build the head of a request; underscores in the names of headers are hyphens on the wire."""
        given = {"Host": f"{NEIGHBOUR}:{self.port}", "X_API_Key": self.key, **headers}
        lines = (f"{name.replace('_', '-')}: {value}\r\n" for name, value in given.items() if value)
        return f"{method} {path} HTTP/1.1\r\n{''.join(lines)}\r\n".encode()

    async def post(self, path: str, body: bytes, **headers: str | int) -> str:
        return await self.send(self.head(path, "POST", Content_Length=len(body), **headers), body)

    async def send(self, *parts: bytes, within_s: float = ATTACK_S / 2) -> str:
        """Send the parts on a new connection; return the answer."""
        try:
            async with asyncio.timeout(within_s), self.connection() as (reader, writer):
                with suppress(ConnectionError):  # after an early refusal, which is there to be read
                    await _write(writer, *parts)
                return _answer(await reader.readline())
        except TimeoutError:
            return OPEN
        except ConnectionError:
            return CLOSED

    async def trickle(self, head: bytes) -> str:
        """Send a large beginning of a chunked body, then a byte each second, until there is an answer."""
        try:
            async with asyncio.timeout(self.hold_s), self.connection() as (reader, writer):
                await _write(writer, head, b"%x\r\n%b\r\n" % (LARGE, bytes(LARGE)))
                answer = asyncio.ensure_future(reader.readline())
                while not answer.done():
                    writer.write(b"1\r\n.\r\n")
                    await asyncio.wait([answer], timeout=1.0)
                return _answer(answer.result())
        except TimeoutError:
            return OPEN
        except ConnectionError:
            return CLOSED

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Connect from the attacker's address; cut off at the end, whatever was sent."""
        reader, writer = await asyncio.open_connection(NEIGHBOUR, self.port, local_addr=(ATTACKER, 0))
        try:
            yield reader, writer
        finally:
            writer.transport.abort()


def _answer(line: bytes) -> str:
    return line.split()[1].decode() if line else CLOSED


async def _write(writer: asyncio.StreamWriter, *parts: bytes) -> None:
    for part in parts:
        for start in range(0, len(part), PIECE):
            writer.write(part[start : start + PIECE])
            await writer.drain()


async def _together(answers: Iterable[Awaitable[str]]) -> Answers:
    return Counter(await asyncio.gather(*answers))


async def stranger_slow_open_path(door: Door) -> Answers:
    return await _together([door.trickle(door.head("/healthz", Transfer_Encoding="chunked"))])


async def slow_bodies(door: Door) -> Answers:
    head = door.head(PASS, Transfer_Encoding="chunked", **PROTOBUF)
    return await _together(door.trickle(head) for _ in range(64))


async def half_bodies(door: Door) -> Answers:
    head = door.head(PASS, Content_Length=3_300_000)
    return await _together(door.send(head, bytes(1_600_000), within_s=door.hold_s) for _ in range(300))


async def escapes_12_mb(door: Door) -> Answers:
    return await _together([_metadata(door, rb"\n" * (6 * MB))])


async def escapes_64_mb(door: Door) -> Answers:
    return await _together([_metadata(door, rb"\n" * (32 * MB))])


async def metadata_60_mb(door: Door) -> Answers:
    return await _together(_metadata(door, b"x" * (60 * MB)) for _ in range(4))


def _metadata(door: Door, text: bytes) -> Awaitable[str]:
    return door.post(SESSION, b'{"user_metadata":{"a":"%b"}}' % text)


async def many_parts(door: Door) -> Answers:
    """As many values as a body may have, of the kind that takes most memory for its bytes."""
    return await _together([door.post(SESSION, b'{"tags":[' + b"{}," * 1_999_990 + b"{}]}")])


async def deep_json(door: Door) -> Answers:
    bodies = (b"[" * (3 * MB), b"[" * (3 * MB) + b"]" * (3 * MB), b'{"a":' * MB)
    return await _together(door.post(SESSION, body) for body in bodies)


async def zstd_bombs(door: Door) -> Answers:
    """Of 10 GB each."""
    packer = zstandard.ZstdCompressor().compressobj()
    zeros = bytes(100 * MB)
    bomb = b"".join(packer.compress(zeros) for _ in range(100)) + packer.flush()
    return await _together(door.post(PASS, bomb, Content_Encoding="zstd") for _ in range(16))


async def stranger_headers_8_mb(door: Door) -> Answers:
    """One long header, many short ones, and a long path."""
    heads = [
        door.head("/healthz", "GET", X_Long="x" * (8 * MB)),
        door.head("/healthz", "GET", **{f"X_{number}": "x" * 80 for number in range(100_000)}),
        door.head("/healthz?" + "x" * (8 * MB), "GET"),
    ]
    return await _together(door.send(head) for head in heads)


async def stranger_heads_300(door: Door) -> Answers:
    return await _half_sent(door, 300)


async def stranger_heads_3000(door: Door) -> Answers:
    return await _half_sent(door, 3000)


async def stranger_large_heads_3000(door: Door) -> Answers:
    return await _half_sent(door, 3000, 60_000)


async def _half_sent(door: Door, count: int, size: int = 1000) -> Answers:
    half = door.head("/healthz", "GET", X_Long="x" * size)[:-4]
    return await _together(door.send(half, within_s=door.hold_s) for _ in range(count))


async def stranger_connections_3000(door: Door) -> Answers:
    """They send nothing."""
    return await _together(door.send(within_s=door.hold_s) for _ in range(3000))


async def bodies_208(door: Door) -> Answers:
    data = bytes(random_data(160, 1031))
    names = [body_name(door.model_id, number) for number in range(2, 210)]
    head = [door.head(PASS, Content_Length=len(name) + len(data), **PROTOBUF) for name in names]
    return await _together(door.send(*parts, data) for parts in zip(head, names, strict=True))


async def polls_of_16_mb(door: Door) -> Answers:
    """Ask for results that never come, with bodies that would hold all that is there for large ones."""
    body = b'{"request_id": "%b"}%b' % (b"0" * 32, b" " * (16 * MB))
    return await _together(door.post("/api/v1/retrieve_future", body) for _ in range(8))


async def foreign_host(door: Door) -> Answers:
    return await _together([door.post(SESSION, b"{}", Host="evil.example:8000")])


async def foreign_origin(door: Door) -> Answers:
    """As a browser posts for a page of another site."""
    headers = (
        {"Origin": "https://evil.example", "Content-Type": "text/plain"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
    )
    return await _together(door.post(SESSION, b"{}", **each) for each in headers)


@dataclass(frozen=True)
class Case:
    """`bad`: answers that the attacker must not get; `needed`: of which it must get one."""

    attack: Callable[[Door], Awaitable[Answers]]
    bad: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    keys: bool = True


CASES = {
    case.attack.__name__: case
    for case in (
        Case(stranger_slow_open_path, bad=("200", OPEN)),
        Case(slow_bodies),
        Case(half_bodies),
        Case(escapes_12_mb),
        Case(escapes_64_mb),
        Case(metadata_60_mb, bad=("200",)),
        Case(many_parts),
        Case(deep_json, bad=("200",)),
        Case(zstd_bombs, bad=("200",)),
        Case(stranger_headers_8_mb, bad=("200",)),
        Case(stranger_heads_300, bad=(OPEN,)),
        Case(stranger_heads_3000, bad=(OPEN,)),
        Case(stranger_large_heads_3000, bad=(OPEN,)),
        Case(stranger_connections_3000, needed=(CLOSED, "408", "503")),
        Case(bodies_208, needed=("200",)),
        Case(polls_of_16_mb, needed=("413",)),
        Case(foreign_host, bad=("200",), keys=False),
        Case(foreign_origin, bad=("200",), keys=False),
    )
}


def attacked(name: str, door: Door) -> Answers:
    """Run an attack in this process."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return asyncio.run(_bounded(CASES[name].attack(door)))


async def _bounded(attack: Awaitable[Answers]) -> Answers:
    async with asyncio.timeout(ATTACK_S):
        return await attack


# The neighbour


@dataclass
class Tenant:
    """Whose requests are small or of 400 KB. `waits`: seconds of each; infinite without an answer."""

    api: Api
    http: aiohttp.ClientSession
    session_id: str = ""
    model_id: str = ""
    seq_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    waits: list[float] = field(default_factory=list)

    async def start(self) -> None:
        self.session_id = (await self._post("create_session", json={}))["session_id"]
        wanted = {"session_id": self.session_id, "model_seq_id": 0, "base_model": BASE}
        self.model_id = (await self._post("create_model", json=wanted))["model_id"]

    async def ask(self) -> None:
        """Send a large request and a small one, and note how long each takes."""
        body = body_name(self.model_id, next(self.seq_ids)) + DATA
        await asyncio.gather(
            self._timed("forward_backward", data=body, headers={"Content-Type": "application/x-protobuf"}),
            self._timed("session_heartbeat", json={"session_id": self.session_id}),
        )

    async def ask_until(self, done: asyncio.Future[Answers]) -> None:
        """Ask every EVERY_S, answered or not, at least twice."""
        asked: list[asyncio.Task[None]] = []
        while len(asked) < 2 or not done.done():
            asked.append(asyncio.create_task(self.ask()))
            await asyncio.sleep(EVERY_S)
        await asyncio.gather(*asked)

    async def _timed(self, path: str, **request: Any) -> None:
        began = time.perf_counter()
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._post(path, **request)
            self.waits.append(time.perf_counter() - began)
        except (TimeoutError, aiohttp.ClientError):
            self.waits.append(float("inf"))

    async def _post(self, path: str, **request: Any) -> Any:
        async with self.http.post(f"{self.api.url}/api/v1/{path}", **request) as answer:
            answer.raise_for_status()
            return await answer.json()


@asynccontextmanager
async def tenant(api: Api, key: str | None) -> AsyncIterator[Tenant]:
    async with aiohttp.ClientSession(
        headers={"X-API-Key": key} if key else {},
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(),
    ) as http:
        made = Tenant(api, http)
        await made.start()
        yield made


async def meet(name: str, api: Api, keys: Mapping[str, str], hold_s: float, attackers: Executor) -> Json:
    """Attack this API while a neighbour goes on; return the figures of the table."""
    async with tenant(api, keys.get("neighbour")) as neighbour, tenant(api, keys.get("attacker")) as other:
        for _ in range(5):
            await neighbour.ask()
        neighbour.waits.clear()
        key = None if name.startswith("stranger") else keys.get("attacker")
        door = Door(api.settings.port, key, other.model_id, hold_s)
        idle_mb = memory_mb(api, "VmRSS")
        forget_peak(api)
        attack = asyncio.get_running_loop().run_in_executor(attackers, attacked, name, door)
        await neighbour.ask_until(attack)
        answers = await attack
    return figures(memory_mb(api, "VmHWM") - idle_mb, answers, neighbour.waits)


def memory_mb(api: Api, what: str) -> float:
    """Return a figure of the API's process in 10^6 bytes."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path(f"/proc/{api.process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 / MB


def forget_peak(api: Api) -> None:
    """Let VmHWM begin at what the process takes now (proc(5), clear_refs)."""
    Path(f"/proc/{api.process.pid}/clear_refs").write_text("5")


# The report


def figures(peak_mb: float, answers: Answers, waits: Sequence[float]) -> Json:
    answered = [wait for wait in waits if wait < float("inf")]
    return {
        "peak_mb": round(peak_mb, 1),
        "answers": dict(answers),
        "neighbour_requests": len(waits),
        "neighbour_failed": len(waits) - len(answered),
        "neighbour_max_ms": round(1000 * max(answered)) if answered else None,
    }


def missed(name: str, row: Json) -> list[str]:
    """Name the bars that this attack missed."""
    case, answers = CASES[name], row["answers"]
    wrong = [f"{name}: {answers[bad]} x {bad}" for bad in case.bad if bad in answers]
    if case.needed and not set(case.needed) & set(answers):
        wrong.append(f"{name}: never {' or '.join(case.needed)}")
    if row["peak_mb"] > MOST_MB:
        wrong.append(f"{name}: {row['peak_mb']:.0f} MB over idle")
    if row["neighbour_failed"]:
        wrong.append(f"{name}: {row['neighbour_failed']} requests of the neighbour were not answered")
    return wrong


def show(name: str, row: Json) -> None:
    neighbour = f"{row['neighbour_requests'] - row['neighbour_failed']}/{row['neighbour_requests']}"
    answers = ", ".join(f"{count} x {answer}" for answer, count in row["answers"].items())
    print(
        f"{name:28}{row['peak_mb']:9.1f}{neighbour:>11}{row['neighbour_max_ms']!s:>9}  {answers}", flush=True
    )


# The servers


def make_home(home: Path, holders: Sequence[str]) -> dict[str, str]:
    """Make a home with a key for each of these, by the command line."""
    settings = settings_for(home)
    home.mkdir()
    migrate(settings.store_url)
    asyncio.run(write_state(settings.store_url))
    return {holder: make_key(home, holder) for holder in holders}


async def write_state(url: str) -> None:
    """Write what the API reads of `serve` and of an engine."""
    store = Store.open(url)
    await write_facts(store)
    ready = {"state": "ready", "detail": "", "since": 0.0}
    await store.write(lambda conn: server_state.put(conn, "engine", ready))
    await store.close()


def make_key(home: Path, holder: str) -> str:
    command = [sys.executable, "-m", "skyrl_tinker", "keys", "create", "--name", holder, "--home", str(home)]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=home.parent).stdout.strip()


@contextmanager
def fresh(home: Path) -> Iterator[Api]:
    """Run an API on a copy of this home."""
    with tempfile.TemporaryDirectory() as directory:
        copied = shutil.copytree(home, Path(directory) / "home")
        listener = preflight.listen(NEIGHBOUR, 0)
        settings = settings_for(copied, port=listener.getsockname()[1])
        with listener, launched(settings, listener) as api:
            api.wait_until_up()
            yield api


def measure(directory: Path, names: Sequence[str], hold_s: float) -> dict[str, Json]:
    locked, keyless = directory / "locked", directory / "keyless"
    keys = make_home(locked, ("neighbour", "attacker"))
    make_home(keyless, ())
    rows = {}
    print(f"{'':28}{'peak MB':>9}{'answered':>11}{'max ms':>9}  answers of the attacker")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as attackers:
        attackers.submit(run_when_idle).result()  # it has started
        for name in names:
            home, known = (locked, keys) if CASES[name].keys else (keyless, {})
            with fresh(home) as api:
                rows[name] = asyncio.run(meet(name, api, known, hold_s, attackers))
            show(name, rows[name])
    return rows


def main() -> int:
    parser = options_of(__doc__)
    parser.add_argument("--attacks", help=f"some of {','.join(CASES)}")
    parser.add_argument("--hold", type=float, default=20.0, help="seconds")
    arguments = parser.parse_args()
    names = chosen(parser, arguments.attacks, CASES)
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(Path(directory), names, arguments.hold)
    result = {
        "worst_mb": max(row["peak_mb"] for row in rows.values()),
        "neighbours_failed": sum(row["neighbour_failed"] for row in rows.values()),
        "missed": [text for name, row in rows.items() for text in missed(name, row)],
        "attacks": rows,
    }
    return judged(result)


if __name__ == "__main__":
    sys.exit(main())

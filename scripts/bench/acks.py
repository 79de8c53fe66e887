#!/usr/bin/env python3
"""Requests that are acknowledged per second, each on disk before it is: by the store, and over HTTP.

usage: scripts/bench/acks.py [--postgresql | --database-url URL] [--requests N] [--at-once N]

The store: processes, one and then two as several API processes would be, each submit N samples with bodies of
2 KB, so many at a time, and ring the engine behind each commit, which nobody answers.

Over HTTP: one API process and then two on one port, as `serve` runs them, without an engine. Two clients,
each a process of its own, submit N samples with bodies of 2 KB, so many at a time, and wait for the request
ids. They and the database take processor time of the same cores: they write requests that they have made
before, and read no more of an answer than they need.

The database is SQLite in a temporary directory, with --postgresql a PostgreSQL started here, or that of the
URL, which must be empty: it keeps what this writes. Ends by itself, with the default arguments within two
minutes.

Prints a table and, as its last line, one JSON object: database; acks_per_s_1, acks_per_s_2; p50_ms_1,
p99_ms_1, p50_ms_2, p99_ms_2: of one acknowledgement, with so many processes; the same over HTTP as
http_acks_per_s_1, …; alone_ms: median of one at a time; ring_ms: median of a ring from one process to another
and back.
"""

import asyncio
import json
import re
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import uvloop
from serving import options_of
from sqlalchemy import Connection

from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.ids import SamplingSessionId
from skyrl_tinker.server.api_processes import ApiProcesses
from skyrl_tinker.server.child_process import ChildProcess, last_line
from skyrl_tinker.store import sampling_sessions, server_state, session_records
from skyrl_tinker.store.cluster.notify_bell import bind_doorbell
from skyrl_tinker.store.database.group_commit import Later
from skyrl_tinker.store.database.migrate import migrate
from skyrl_tinker.store.database.opening import file_of
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.futures.record import Accepted
from skyrl_tinker.store.futures.sample_submission import NewSample, submit_sample
from skyrl_tinker.store.store import Store
from skyrl_tinker.system.processes import freeze_gc
from tests.api.support.world import BASE, FACTS, sample
from tests.support.postgres import postgres_server

T = TypeVar("T")
BODY = bytes(2048)
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [123] * 500}]}
UNLIMITED = 10**9
CLIENTS = 2
PROCESSES = (1, 2)
ALONE = 200
RINGS = 500


@dataclass(frozen=True)
class Part:
    """What one process did: UTC seconds, and the seconds of each acknowledgement."""

    began: float
    ended: float
    waits: list[float]


def main() -> None:
    parser = options_of(__doc__)
    database = parser.add_mutually_exclusive_group()
    database.add_argument("--postgresql", action="store_true", help="start one, of Debian's package")
    database.add_argument("--database-url", help="of an empty database")
    parser.add_argument("--requests", type=int, default=3000, help="of each process")
    parser.add_argument("--at-once", type=int, default=64)
    given = parser.parse_args()
    with ExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory())
        url = given.database_url or Settings(home=Path(home)).store_url
        if given.postgresql:
            url = stack.enter_context(postgres_server(durable=True)).new_database()
        migrate(url)
        print(json.dumps(measure(url, home, given.requests, given.at_once)))


def measure(url: str, home: str, requests: int, at_once: int) -> dict[str, object]:
    found: dict[str, object] = {"database": "PostgreSQL" if file_of(url) is None else "SQLite"}
    found["ring_ms"] = round(1000 * ring_there_and_back(url, home), 3)
    (alone,) = together(1, submit, url, home, ALONE, 1)
    found["alone_ms"] = round(1000 * statistics.median(alone.waits), 3)
    print(f"{found['database']}: ring {found['ring_ms']} ms, alone {found['alone_ms']} ms")
    print(f"{'':10}{'processes':>10}{'acks/s':>10}{'p50 ms':>10}{'p99 ms':>10}")
    for processes in PROCESSES:
        found |= tell("", processes, together(processes, submit, url, home, requests, at_once))
    for processes in PROCESSES:
        found |= tell("http_", processes, asyncio.run(over_http(processes, url, home, requests, at_once)))
    return found


def tell(way: str, processes: int, parts: list[Part]) -> dict[str, float]:
    """Print a line of the table and return its figures."""
    waits = [wait for part in parts for wait in part.waits]
    rate = round(len(waits) / (max(part.ended for part in parts) - min(part.began for part in parts)))
    percentiles = statistics.quantiles(waits, n=100)
    p50, p99 = (round(1000 * percentiles[place], 2) for place in (49, 98))
    print(f"{'over HTTP' if way else 'store':10}{processes:10}{rate:10}{p50:10}{p99:10}", flush=True)
    figures = {"acks_per_s": rate, "p50_ms": p50, "p99_ms": p99}
    return {f"{way}{name}_{processes}": value for name, value in figures.items()}


def ring_there_and_back(url: str, home: str) -> float:
    """Return the median of seconds."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        pool.submit(pause, 0.0).result()
        answering = pool.submit(answer, url, home)
        seconds = asyncio.run(_ring(url, home))
        answering.result()
    return statistics.median(seconds)


async def _ring(url: str, home: str) -> list[float]:
    bell = bind_doorbell(url, Path(home), "api")
    seconds = list[float]()
    while len(seconds) < RINGS:
        started = time.perf_counter()
        bell.ring("engine")
        if await bell.wait(1.0):
            seconds.append(time.perf_counter() - started)
    bell.close()
    return seconds


def answer(url: str, home: str) -> None:
    asyncio.run(_answer(url, home))


async def _answer(url: str, home: str) -> None:
    bell = bind_doorbell(url, Path(home), "engine")
    while await bell.wait(3.0):
        bell.ring("api")
    bell.close()


def together(processes: int, work: Callable[..., T], *arguments: Any) -> list[T]:
    """Do it in so many processes, which are up before the first request."""
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        list(pool.map(pause, [0.5] * processes))
        return [part.result() for part in [pool.submit(work, *arguments) for _ in range(processes)]]


def pause(seconds: float) -> None:
    time.sleep(seconds)


async def timed(requests: int, at_once: int, acknowledged: Callable[[int], Awaitable[None]]) -> Part:
    numbers, waits = iter(range(requests)), list[float]()

    async def keep_submitting() -> None:
        for number in numbers:
            started = time.perf_counter()
            await acknowledged(number)
            waits.append(time.perf_counter() - started)

    began = time.time()
    await asyncio.gather(*(keep_submitting() for _ in range(at_once)))
    return Part(began, time.time(), waits)


# Over HTTP


async def over_http(processes: int, url: str, home: str, requests: int, at_once: int) -> list[Part]:
    settings = Settings(home=Path(home), database_url=url, sample_backlog=UNLIMITED, api_processes=processes)
    async with api_processes(settings) as address:
        return await asyncio.to_thread(together, CLIENTS, submit_over_http, address, requests, at_once)


@asynccontextmanager
async def api_processes(settings: Settings) -> AsyncIterator[str]:
    """Their URL."""
    directories = Directories(settings)
    directories.make()
    store = Store.open(settings.store_url)
    bases = Bases((replace(FACTS, context_length=4096),))
    await store.write(lambda conn: server_state.put_bases(conn, bases))
    await store.close()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        directories.settings_file.write_text(settings.model_dump_json())
        processes = ApiProcesses(settings.api_processes, directories, listener, ended)
        running = asyncio.create_task(processes.run())
        children = processes.children
        while not all(each.pid and directories.listening_note(each.pid).exists() for each in children):
            assert not running.done(), running.exception()
            await asyncio.sleep(0.1)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/api/v1/"
        running.cancel()
        await asyncio.wait([running])
        for process in [each.process for each in children if each.process]:
            process.terminate()
            await process.wait()


async def ended(child: ChildProcess, code: int) -> None:
    raise SystemExit(f"the {child.name} ended with {code}: {last_line(child.log)}")


def submit_over_http(url: str, requests: int, at_once: int) -> Part:
    return uvloop.run(_submit_over_http(url, requests, at_once))


async def _submit_over_http(url: str, requests: int, at_once: int) -> Part:
    address = urlsplit(url)
    idle = [await asyncio.open_connection(address.hostname, address.port) for _ in range(at_once)]

    async def ask(request: bytes, answer: str) -> str:
        reader, writer = idle.pop()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        size = re.search(rb"(?i)content-length: (\d+)", head)
        body = await reader.readexactly(int(size[1]) if size else 0)
        idle.append((reader, writer))
        assert head.startswith(b"HTTP/1.1 200 "), head + body
        return str(json.loads(body)[answer])

    session = await ask(post(url, "create_session", {"sdk_version": "0.38.0"}), "session_id")
    birth = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
    sampler = await ask(post(url, "create_sampling_session", birth), "sampling_session_id")
    made = [post(url, "asample", sample(sampler, number, prompt=PROMPT)) for number in range(requests)]

    async def acknowledged(number: int) -> None:
        await ask(made[number], "request_id")

    part = await timed(requests, at_once, acknowledged)
    for _, writer in idle:
        writer.close()
    return part


def post(url: str, path: str, body: dict[str, Any]) -> bytes:
    """Return a request of HTTP/1.1."""
    address, content = urlsplit(url), json.dumps(body).encode()
    head = (
        f"POST {address.path}{path} HTTP/1.1\r\nHost: {address.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


# The store


def submit(url: str, home: str, requests: int, at_once: int) -> Part:
    freeze_gc()  # as API processes do
    return asyncio.run(_submit(url, home, requests, at_once))


async def _submit(url: str, home: str, requests: int, at_once: int) -> Part:
    store, bell = Store.open(url), bind_doorbell(url, Path(home), "api")
    session = await store.write(lambda conn: session_records.create(conn, owner=None, sdk_version="bench"))
    sampler = await store.write(
        lambda conn: sampling_sessions.create(
            conn, session, 0, base_model="none", model_path=None, version_id=None
        )
    )
    part = await timed(requests, at_once, lambda number: _acknowledged(store, bell, sampler, number))
    await store.close()
    bell.close()
    return part


async def _acknowledged(store: Store, bell: Doorbell, sampler: SamplingSessionId, number: int) -> None:
    digest = uuid4().bytes

    def op(conn: Connection) -> Later[Accepted]:
        return submit_sample(conn, NewSample(sampler, number, digest, BODY, 1, 1, 1), None)

    _: Accepted = await store.write(op, lambda: bell.ring("engine"))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Requests that the store acknowledges per second, each on disk before it is: SQLite, or PostgreSQL.

usage: scripts/bench/acks.py [--database-url URL] [--requests N] [--at-once N]

Processes, one and then two as several API processes would be, each submit N samples with bodies of 2 KB, so
many at a time, and ring the engine behind each commit, which nobody answers. The database of the URL must be
empty: it keeps what this writes. Without a URL it is SQLite in a temporary directory. Ends by itself, within
a minute.

Prints, as its last line, one JSON object: database; acks_per_s_1, acks_per_s_2; p50_ms_1, p99_ms_1, p50_ms_2,
p99_ms_2: of one acknowledgement, with so many processes; alone_ms: median of one at a time; ring_ms: median
of a ring from one process to another and back.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from uuid import uuid4

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from skyrl_tinker.config import Settings
from skyrl_tinker.domain.ids import SamplingSessionId
from skyrl_tinker.store import sampling_sessions, session_records
from skyrl_tinker.store.cluster.doorbells import bind_doorbell
from skyrl_tinker.store.database.migrate import migrate
from skyrl_tinker.store.database.opening import file_of
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.futures import sample_submission
from skyrl_tinker.store.store import Store

BODY = bytes(2048)
ALONE = 200
RINGS = 500


@dataclass(frozen=True)
class Part:
    """What one process did: UTC seconds, and the seconds of each acknowledgement."""

    began: float
    ended: float
    waits: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--database-url", help="SQLite in a temporary directory, by default")
    parser.add_argument("--requests", type=int, default=5000, help="of each process")
    parser.add_argument("--at-once", type=int, default=64)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        url = given.database_url or Settings(home=Path(home)).store_url
        migrate(url)
        found: dict[str, object] = {"database": "PostgreSQL" if file_of(url) is None else "SQLite"}
        found["ring_ms"] = round(1000 * ring_there_and_back(url, home), 3)
        (alone,) = together(1, url, home, ALONE, 1)
        found["alone_ms"] = round(1000 * statistics.median(alone.waits), 3)
        for processes in (1, 2):
            parts = together(processes, url, home, given.requests, given.at_once)
            waits = [wait for part in parts for wait in part.waits]
            seconds = max(part.ended for part in parts) - min(part.began for part in parts)
            found[f"acks_per_s_{processes}"] = round(len(waits) / seconds)
            for name, place in (("p50", 49), ("p99", 98)):
                percentile = statistics.quantiles(waits, n=100)[place]
                found[f"{name}_ms_{processes}"] = round(1000 * percentile, 2)
        print(json.dumps(found))


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


def together(processes: int, url: str, home: str, requests: int, at_once: int) -> list[Part]:
    """Submit from so many processes, which are up before the first request."""
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        list(pool.map(pause, [0.5] * processes))
        return list(pool.map(submit, *zip(*[(url, home, requests, at_once)] * processes, strict=True)))


def pause(seconds: float) -> None:
    time.sleep(seconds)


def submit(url: str, home: str, requests: int, at_once: int) -> Part:
    return asyncio.run(_submit(url, home, requests, at_once))


async def _submit(url: str, home: str, requests: int, at_once: int) -> Part:
    store, bell = Store.open(url), bind_doorbell(url, Path(home), "api")
    session = await store.write(lambda conn: session_records.create(conn, owner=None, sdk_version="bench"))
    sampler = await store.write(
        lambda conn: sampling_sessions.create(
            conn, session, 0, base_model="none", model_path=None, version_id=None
        )
    )
    numbers, waits = iter(range(requests)), list[float]()

    async def keep_submitting() -> None:
        for number in numbers:
            started = time.perf_counter()
            await _acknowledged(store, bell, sampler, number)
            waits.append(time.perf_counter() - started)

    began = time.time()
    await asyncio.gather(*(keep_submitting() for _ in range(at_once)))
    ended = time.time()
    await store.close()
    bell.close()
    return Part(began, ended, waits)


async def _acknowledged(store: Store, bell: Doorbell, sampler: SamplingSessionId, number: int) -> None:
    digest = uuid4().bytes
    await store.write(
        lambda conn: sample_submission.submit_sample(
            conn,
            sampler,
            number,
            owner=None,
            body=BODY,
            digest=digest,
            num_samples=1,
            tokens=1,
            sequences=1,
        ),
        lambda: bell.ring("engine"),
    )


if __name__ == "__main__":
    main()

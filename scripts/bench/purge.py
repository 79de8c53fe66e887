#!/usr/bin/env python3
"""Time that the purge of old rows holds the write lock, and what another writer notices of it.

usage: scripts/bench/purge.py [--requests N] [--result-bytes N]

Fills a database with so many ended samples (a million by default; one in five has a result still, one in ten
is of an ended session), then purges it all as the engine does, while another store, as that of another
process, writes a heartbeat every few milliseconds. Ends by itself, with a million after about three minutes.

Prints, as its last line, one JSON object: slices; slice_p50_ms, slice_p99_ms, slice_max_ms: time in a slice;
writer_p50_ms, writer_p99_ms, writer_max_ms: of the other writer meanwhile; rows_left; db_mb.
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from serving import options_of
from sqlalchemy import Connection, func, select

from skyrl_tinker.config import Settings
from skyrl_tinker.domain.ids import SessionId
from skyrl_tinker.engine.upkeep.purge import Purge
from skyrl_tinker.store import session_records
from skyrl_tinker.store.database import sqlite
from skyrl_tinker.store.database.migrate import migrate
from skyrl_tinker.store.database.tables import Future
from skyrl_tinker.store.store import Store

OLD_S = 100 * 86400.0
AT_ONCE = 50_000
ENDED = 100  # sessions
PAUSE_S = 0.002
_FUTURE = (
    "INSERT INTO futures (request_id, kind, session_id, sampling_session_id, seq_id, digest, sequence_ids,"
    " status, created_at, finished_at) VALUES (?, 'sample', ?, ?, ?, x'00', '[]', 'done', ?, ?)"
)
_RESULT = (
    "INSERT INTO results (future_id, content_type, body, input_tokens, cached_tokens, output_tokens)"
    " VALUES (?, 'application/x-protobuf', zeroblob(?), 1, 0, 1)"
)


class TimedStore:
    """The engine's store; notes how long each op takes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.seconds: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def write(self, op: Callable[[Connection], Any]) -> Any:
        def timed(conn: Connection) -> Any:
            began = time.perf_counter()
            value = op(conn)
            self.seconds.append(time.perf_counter() - began)
            return value

        return await self._store.write(timed)


async def new_sessions(store: Store, count: int) -> list[SessionId]:
    return [
        await store.write(lambda conn: session_records.create(conn, owner=None, sdk_version="0.38.0"))
        for _ in range(count)
    ]


async def fill(store: Store, requests: int, result_bytes: int) -> SessionId:
    """Insert the rows; returns a session that is live."""
    live, *ended = await new_sessions(store, 1 + ENDED)
    old = time.time() - OLD_S
    samplers = [(f"{session}:sample:0", session) for session in (live, *ended)]
    await store.write(lambda conn: raw(conn).executemany(_SAMPLER, [(*each, old) for each in samplers]))
    for first in range(0, requests, AT_ONCE):
        rows, results = [], []
        for number in range(first, min(first + AT_ONCE, requests)):
            sampler, session = samplers[0 if number % 10 else 1 + number // 10 % ENDED]
            rows.append((f"r{number}", session, sampler, number, old, old))
            if number % 5 == 0:
                results.append((number + 1, result_bytes))
        await store.write(lambda conn, rows=rows: raw(conn).executemany(_FUTURE, rows))
        await store.write(lambda conn, results=results: raw(conn).executemany(_RESULT, results))
    for session in ended:
        await store.write(lambda conn, session=session: session_records.finish(conn, session, "done", None))
    await store.write(
        lambda conn: raw(conn).execute("UPDATE sessions SET finished_at = ? WHERE finished_at", (old,))
    )
    return live


_SAMPLER = (
    "INSERT INTO sampling_sessions (sampling_session_id, session_id, sampling_session_seq_id, base_model,"
    " created_at) VALUES (?, ?, 0, 'tiny', ?)"
)


def raw(conn: Connection) -> Any:
    return sqlite.raw(conn)


async def beat(store: Store, session: SessionId, waits: list[float]) -> None:
    while True:
        began = time.perf_counter()
        await store.write(lambda conn: session_records.heartbeat(conn, [(None, session)]))
        waits.append(time.perf_counter() - began)
        await asyncio.sleep(PAUSE_S)


def spread(name: str, seconds: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=100)
    values = {"p50": cuts[49], "p99": cuts[98], "max": max(seconds)}
    return {f"{name}_{key}_ms": round(1000 * value, 2) for key, value in values.items()}


async def measure(home: Path, requests: int, result_bytes: int) -> dict[str, Any]:
    settings = Settings(home=home)
    migrate(settings.store_url)
    store, other = Store.open(settings.store_url), Store.open(settings.store_url)
    try:
        session = await fill(store, requests, result_bytes)
        print(f"{requests} requests are in the database", flush=True)
        waits: list[float] = []
        beating = asyncio.create_task(beat(other, session, waits))
        timed: Any = TimedStore(store)
        await Purge(timed, settings).run(time.time())
        beating.cancel()
        left = await store.read(lambda conn: conn.scalar(select(func.count()).select_from(Future)))
    finally:
        await store.close()
        await other.close()
    return {
        "slices": len(timed.seconds),
        **spread("slice", timed.seconds),
        **spread("writer", waits),
        "rows_left": left,
    }


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--result-bytes", type=int, default=2000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        report = asyncio.run(measure(home, arguments.requests, arguments.result_bytes))
        database = home / "skyrl-tinker.db"
        print(json.dumps({**report, "db_mb": round(database.stat().st_size / 1e6, 1)}))


if __name__ == "__main__":
    main()

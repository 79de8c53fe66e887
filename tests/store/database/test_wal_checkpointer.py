"""The log is copied into the database beside the writers, and stays bounded however much is written."""

import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from sqlalchemy import Connection, text

from skyrl_tinker.domain.ids import SamplingSessionId
from skyrl_tinker.domain.units import MiB
from skyrl_tinker.store.database import sqlite_database
from skyrl_tinker.store.database.sqlite_database import WalCheckpointer
from skyrl_tinker.store.futures.sample_submission import NewSample, submit_sample
from skyrl_tinker.store.store import Store, write_once
from tests.store.support.databases import on_sqlite
from tests.support.reads import reading

pytestmark = on_sqlite

PAGE_BYTES = 4096
TABLE, ROW = "CREATE TABLE large (body BLOB)", text("INSERT INTO large VALUES (zeroblob(:size))")


def sizes(url: str) -> tuple[int, int]:
    """Bytes of the database file and of its log."""
    path = Path(url.partition("///")[2])
    log = path.with_name(f"{path.name}-wal")
    return path.stat().st_size, log.stat().st_size if log.exists() else 0


async def write(store: Store, size: int) -> None:
    def insert(conn: Connection) -> None:
        conn.execute(ROW, {"size": size})

    await store.write(insert, size=size)


@pytest.fixture(autouse=True)
def table(url: str) -> None:
    write_once(url, lambda conn: conn.execute(text(TABLE)))


async def test_a_commit_copies_nothing(store: Store, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All writers would wait for it."""
    monkeypatch.setattr(WalCheckpointer, "note", lambda checkpointer, size: None)
    before, _ = sizes(url)
    for _ in range(8):
        await write(store, MiB)
    assert sizes(url)[0] < before + MiB
    assert sizes(url)[1] > 8 * MiB


async def test_new_requests_share_pages_of_a_long_journal(
    store: Store, url: str, sampler: SamplingSessionId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids without an order would have each write a page of its own."""
    monkeypatch.setattr(WalCheckpointer, "note", lambda checkpointer, size: None)

    def submit(conn: Connection, seq_ids: range) -> None:
        for seq_id in seq_ids:
            submit_sample(conn, NewSample(sampler, seq_id, b"digest", b"sample", 1, 1, 1), None).value()

    await store.write(lambda conn: submit(conn, range(10_000)))
    _, before = sizes(url)
    await store.write(lambda conn: submit(conn, range(10_000, 10_100)))
    assert sizes(url)[1] - before < 40 * PAGE_BYTES


async def test_large_writes_are_copied_by_and_by_and_the_log_begins_anew(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_database, "LONG_LOG_BYTES", 8 * MiB)
    for _ in range(64):
        await write(store, MiB)
    database, log = sizes(url)
    assert database > 32 * MiB
    assert log < 32 * MiB
    with reading(store) as conn:
        assert conn.execute(text("SELECT count(*) FROM large")).scalar() == 64


async def test_many_small_writes_are_copied_too(store: Store, url: str) -> None:
    before, _ = sizes(url)
    for _ in range(2 * sqlite_database.EVERY_BYTES // sqlite_database.SMALL_WRITE_BYTES):
        await store.write(lambda conn: conn.execute(ROW, {"size": 10_000}) and None)
    assert sizes(url)[0] > before + MiB


async def test_a_log_that_cannot_be_copied_is_a_warning(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = sqlite_database.OperationalError("PRAGMA", None, OSError(os.strerror(28)))
    with monkeypatch.context() as broken:
        broken.setattr(sqlite_database.sqlite, "execute", Mock(side_effect=full))
        checkpointer = WalCheckpointer(store._database.engine, url.partition("///")[2])
        checkpointer.note(sqlite_database.EVERY_BYTES)
        await checkpointer.close()
    assert "could not be copied" in caplog.text
    await write(store, MiB)

"""A backup: all that was acknowledged before it, in one state, or no file."""

import asyncio
import itertools
import signal
import sqlite3
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import Connection

from skyrl_tinker.errors import StorageError, UserError
from skyrl_tinker.store import server_state
from skyrl_tinker.store.database import sqlite
from skyrl_tinker.store.database.backup import back_up
from skyrl_tinker.store.store import Store
from tests.store.support.databases import on_sqlite
from tests.support.reads import reading

pytestmark = on_sqlite

LARGE = "x" * 4096
KILLED_AT = """
import os, sys
from pathlib import Path
from skyrl_tinker.store.database import backup
step = getattr(backup, sys.argv[3])
def dies(*arguments):
    if sys.argv[3] != "fsync":
        step(*arguments)
    os.kill(os.getpid(), 9)
setattr(backup, sys.argv[3], dies)
backup.back_up(sys.argv[1], Path(sys.argv[2]))
"""


def rows(file: Path) -> dict[str, str]:
    """The state in a database that is sound."""
    connection = sqlite3.connect(f"file:{file}?mode=ro&immutable=1", uri=True)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    found = dict(connection.execute("SELECT key, value FROM server_state"))
    connection.close()
    return found


def pair(conn: Connection, number: int) -> None:
    """Two rows that no state has only one of."""
    server_state.put(conn, f"a{number}", LARGE)
    server_state.put(conn, f"b{number}", LARGE)


async def test_it_has_what_was_acknowledged_before_while_others_write(
    store: Store, url: str, tmp_path: Path
) -> None:
    acknowledged: list[int] = []
    done = asyncio.Event()

    async def write(first: int) -> None:
        for number in itertools.count(first, 4):
            if done.is_set():
                return
            await store.write(partial(pair, number=number))
            acknowledged.append(number)

    await asyncio.gather(*(store.write(partial(pair, number=-number)) for number in range(1, 500)))
    writers = [asyncio.create_task(write(first)) for first in range(4)]
    for attempt in range(10):
        await store.write(partial(pair, number=-1000 - attempt))
        before = [*acknowledged, -1000 - attempt]
        file = tmp_path / f"copy-{attempt}.db"
        size = await asyncio.to_thread(back_up, url, file)
        assert size == file.stat().st_size
        found = rows(file)
        assert {f"{letter}{number}" for number in before for letter in "ab"} <= found.keys()
        assert {key[1:] for key in found if key[0] == "a"} == {key[1:] for key in found if key[0] == "b"}
    done.set()
    await asyncio.gather(*writers)


async def test_it_is_a_file_of_its_own_that_only_this_user_reads(
    store: Store, url: str, tmp_path: Path
) -> None:
    await store.write(lambda conn: server_state.put(conn, "secret", "s"))
    (tmp_path / "elsewhere").mkdir()
    back_up(url, tmp_path / "elsewhere" / "copy.db")
    (file,) = (tmp_path / "elsewhere").iterdir()
    assert (file.name, stat.S_IMODE(file.stat().st_mode)) == ("copy.db", 0o600)
    assert rows(file)["secret"] == '"s"'


async def test_a_store_opens_it(store: Store, url: str, tmp_path: Path) -> None:
    await store.write(lambda conn: server_state.put(conn, "k", "v"))
    back_up(url, tmp_path / "copy.db")
    copy = Store.open(f"{sqlite.DRIVER}:///{tmp_path / 'copy.db'}")
    await copy.write(lambda conn: server_state.put(conn, "k2", "v2"))
    with reading(copy) as conn:
        assert [server_state.get(conn, key) for key in ("k", "k2")] == ["v", "v2"]
    await copy.close()


@pytest.mark.parametrize("link", [False, True])
def test_a_file_that_exists_stays_as_it_is(url: str, tmp_path: Path, link: bool) -> None:
    file = tmp_path / "copy.db"
    if link:
        file.symlink_to("nowhere")
    else:
        file.write_text("mine")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"copy\.db exists: name a file that does not"):
        back_up(url, file)
    assert sorted(tmp_path.iterdir()) == before
    assert link or file.read_text() == "mine"


def test_without_its_directory_there_is_none(url: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"no backup .*/absent/copy\.db was made: No such file"):
        back_up(url, tmp_path / "absent" / "copy.db")


async def test_of_a_damaged_database_there_is_none(store: Store, url: str, tmp_path: Path) -> None:
    for number in range(50):
        await store.write(partial(pair, number=number))
    await store.close()
    with (tmp_path / "store.db").open("r+b") as database:
        size = database.seek(0, 2)
        database.seek(size // 2)
        database.write(b"\xff" * 16384)
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(StorageError, match=r"damaged|malformed"):
        back_up(url, tmp_path / "elsewhere" / "copy.db")
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("step", ["_copy", "fsync"])
def test_one_that_is_killed_leaves_no_file_and_is_no_obstacle(url: str, tmp_path: Path, step: str) -> None:
    file = tmp_path / "elsewhere" / "copy.db"
    file.parent.mkdir()
    killed = subprocess.run([sys.executable, "-c", KILLED_AT, url, str(file), step], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not file.exists()
    back_up(url, file)
    assert "alembic_version" in tables(file)


def tables(file: Path) -> set[str]:
    connection = sqlite3.connect(file)
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    connection.close()
    return names

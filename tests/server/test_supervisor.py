"""Steps of a server that its operator is told."""

import asyncio
import socket
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Connection

from skyrl_tinker import config
from skyrl_tinker.directories import Directories
from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.server import supervisor
from skyrl_tinker.server.child_process import ChildProcess
from skyrl_tinker.store import server_state
from skyrl_tinker.store.cluster.server_lease import Lease
from skyrl_tinker.store.database.migrate import migrate
from skyrl_tinker.store.store import Store
from tests.api.support.world import FACTS
from tests.support.waiting import until


async def test_the_engine_does_not_wait_for_weights_of_further_base_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it end if they cannot be fetched: that is tried again."""
    monkeypatch.setattr(supervisor, "_FETCH_AGAIN_S", 0.01)
    settings, told = config.load(home=tmp_path), []
    (directories := Directories(settings)).make()
    migrate(settings.store_url)
    fetched, failing, started = [], asyncio.Event(), asyncio.Event()

    async def run(child: ChildProcess) -> int:
        if child.name == "engine":
            started.set()
            await asyncio.Event().wait()
        fetched.append(child.arguments)
        await failing.wait()
        return 2 - len(fetched)

    monkeypatch.setattr(ChildProcess, "run", run)
    (directories.log_dir / "download.log").write_text("the hub is away\n")
    store = Store.open(settings.store_url, settings.root)
    lease = Lease(settings.store_url, settings.root)
    bases = Bases((FACTS, replace(FACTS, names=("b",), directory="/b", hub_name="org/b")))
    with socket.create_server(("127.0.0.1", 0)) as listener, closing(lease):
        served = supervisor._Supervisor(
            settings, directories, bases, listener, lease, told.append, told.append, told.append
        )
        tasks = [asyncio.create_task(work) for work in (served._keep_engine(store), served._fetch_further())]
        await until(lambda: started.is_set() and fetched)
        failing.set()
        await tasks[1]
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await store.close()
    assert fetched == [["org/b"]] * 2
    assert told == ["the download ended (exit code 1), it goes on in 0 s: the hub is away"]


async def test_a_death_of_the_engine_is_told_once_and_its_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_RECORD_S", 0.01)
    settings, told = config.load(home=tmp_path), []
    (directories := Directories(settings)).make()
    migrate(settings.store_url)
    starts = 0

    async def run(child: ChildProcess) -> int:
        nonlocal starts
        starts += 1
        await died.wait() if starts == 1 else await asyncio.Event().wait()
        return 7

    looks, look = [], supervisor._engine_state

    def noted(conn: Connection) -> str:
        looks.append(look(conn))
        return looks[-1]

    monkeypatch.setattr(supervisor, "_engine_state", noted)
    monkeypatch.setattr(ChildProcess, "run", run)
    monkeypatch.setattr(supervisor._Supervisor, "_engine_leftovers", lambda _: [])
    died = asyncio.Event()
    (directories.log_dir / "engine.log").write_text("out of memory\n")
    store = Store.open(settings.store_url, settings.root)
    lease = Lease(settings.store_url, settings.root)
    with socket.create_server(("127.0.0.1", 0)) as listener, closing(lease):
        served = supervisor._Supervisor(
            settings, directories, Bases(()), listener, lease, told.append, told.append, told.append
        )
        served._was_ready = True
        await served._set_engine_state(store, "ready", "")
        tasks = [
            asyncio.create_task(work) for work in (served._report_changes(store), served._keep_engine(store))
        ]
        await until(lambda: looks)
        died.set()
        await until(lambda: looks.count("the engine ended (exit code 7)") > 1)
        ready = {"state": "ready", "detail": "", "since": 0.0}
        await store.write(lambda conn: server_state.put(conn, "engine", ready))
        await until(lambda: "the engine is ready again" in told)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await store.close()
    assert told == [
        "the engine ended (exit code 7), starting it again; last line of its log: out of memory "
        f"(see {directories.log_dir / 'engine.log'})",
        "the engine is ready again",
    ]

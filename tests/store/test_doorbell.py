"""The doorbell wakes at once, counts nothing, and never gets in the way of who rings."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skyrl_tinker.store.cluster.notify_bell import NotifyBell, bind_doorbell
from skyrl_tinker.store.doorbell import Doorbell, Role, SocketBell
from skyrl_tinker.system.user_directory import user_directory
from tests.store.support.databases import on_postgresql
from tests.support.postgres import Postgres
from tests.support.waiting import PATIENCE_S, until


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    place = user_directory(Path("/tmp"), tmp_path)
    if place.exists():
        for left in place.iterdir():
            left.unlink()
        place.rmdir()


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[Doorbell]:
    """The bells whose threads heard something, once for each time; the first time as they were connected."""
    heard: list[Doorbell] = []
    hear = NotifyBell._hear

    def noted(bell: NotifyBell) -> None:
        hear(bell)
        heard.append(bell)

    monkeypatch.setattr(NotifyBell, "_hear", noted)
    return heard


@pytest.fixture
def bells(url: str, home: Path, heard: list[Doorbell]) -> Iterator[Callable[[Role], Doorbell]]:
    """Bells of the processes of one server, on either kind of database."""
    bound: list[Doorbell] = []

    def bind(role: Role) -> Doorbell:
        bound.append(bind_doorbell(url, home, role))
        return bound[-1]

    yield bind
    for bell in bound:
        bell.close()


async def has_heard(bell: Doorbell, heard: list[Doorbell], times: int = 1) -> None:
    """Wait for the thread of a bell, if it has one."""
    if isinstance(bell, NotifyBell):
        await until(lambda: heard.count(bell) >= times)


async def silent(bell: Doorbell, heard: list[Doorbell]) -> None:
    """Hear all that rang so far: a connection that is new wakes its process once."""
    await has_heard(bell, heard)
    await is_rung(bell)


async def is_rung(bell: Doorbell) -> bool:
    """Tell it at once: a socket that can be read is noticed in the loop's next turn."""
    return any([await bell.wait(0) for _ in range(2)])


async def test_a_ring_wakes_at_once(bells: Callable[[Role], Doorbell], heard: list[Doorbell]) -> None:
    engine, api = bells("engine"), bells("api")
    await silent(engine, heard)
    await silent(api, heard)
    for ringing, role, woken in ((api, "engine", engine), (engine, "api", api), (api, "api", api)):
        waiting = asyncio.create_task(woken.wait(PATIENCE_S))
        await asyncio.sleep(0)
        ringing.ring(role)
        assert await waiting


async def test_many_rings_are_few(bells: Callable[[Role], Doorbell], heard: list[Doorbell]) -> None:
    engine, api = bells("engine"), bells("api")
    await silent(engine, heard)
    await silent(api, heard)
    woken = 0

    async def count() -> None:
        nonlocal woken
        while await engine.wait(PATIENCE_S):
            woken += 1

    counting = asyncio.create_task(count())
    for _ in range(1000):
        api.ring("engine")
    api.ring("api")
    assert await api.wait(PATIENCE_S), "behind the thousand"
    few = await until(lambda: woken)
    assert few < 500
    api.ring("engine")
    await until(lambda: woken > few)
    counting.cancel()


async def test_rings_before_the_first_wait_are_kept(
    bells: Callable[[Role], Doorbell], heard: list[Doorbell]
) -> None:
    engine, api = bells("engine"), bells("api")
    await has_heard(engine, heard)
    api.ring("engine")
    await has_heard(engine, heard, times=2)
    assert await engine.wait(PATIENCE_S)


@on_postgresql
async def test_a_bell_whose_connection_is_cut_rings_again(
    bells: Callable[[Role], Doorbell], heard: list[Doorbell], postgres: Postgres
) -> None:
    engine, api = bells("engine"), bells("api")
    await silent(engine, heard)
    await silent(api, heard)
    postgres.stop("immediate")
    api.ring("engine")
    postgres.start()
    assert await engine.wait(PATIENCE_S), "it may have missed a ring"
    assert await api.wait(PATIENCE_S)
    for _ in range(3):  # once would not do: the ring of before may come now
        api.ring("engine")
        assert await engine.wait(PATIENCE_S)
        engine.ring("api")
        assert await api.wait(PATIENCE_S)


@on_postgresql
async def test_a_bell_closes_while_its_database_is_away(
    url: str, home: Path, heard: list[Doorbell], postgres: Postgres, caplog: pytest.LogCaptureFixture
) -> None:
    engine = bind_doorbell(url, home, "engine")
    await silent(engine, heard)
    postgres.stop()
    try:
        await until(lambda: "the doorbell's connection broke" in caplog.text)
        assert not await is_rung(engine)
        engine.ring("api")
        engine.close()
    finally:
        postgres.start()


@on_postgresql
def test_a_bell_rings_on_after_its_loop_has_ended(
    bells: Callable[[Role], Doorbell], heard: list[Doorbell]
) -> None:
    """An exception in its thread would fail this test."""
    engine = bells("engine")
    asyncio.run(silent(engine, heard))
    for times in (2, 3):
        engine.ring("engine")
        asyncio.run(has_heard(engine, heard, times))


@on_postgresql
async def test_a_ring_after_the_end_reaches_no_file_that_was_opened_since(url: str, home: Path) -> None:
    """As that of a commit on its way while its process ends."""
    bell = bind_doorbell(url, home, "engine")
    bell.close()
    read, write = os.pipe2(os.O_NONBLOCK)
    with pytest.raises(OSError):  # noqa: PT011 (which a Writer ignores)
        bell.ring("api")
    with pytest.raises(BlockingIOError):
        os.read(read, 1)
    for file in (read, write):
        os.close(file)


@on_postgresql
async def test_databases_of_one_server_do_not_hear_each_other(
    bells: Callable[[Role], Doorbell], heard: list[Doorbell], postgres: Postgres, tmp_path: Path
) -> None:
    engine, api = bells("engine"), bells("api")
    other = bind_doorbell(postgres.new_database(), tmp_path, "engine")
    for bell in (engine, api, other):
        await has_heard(bell, heard)
    other.ring("engine")
    await has_heard(other, heard, times=2)
    for times in (2, 3):  # with the first, the engine's connection gets all that came before
        engine.ring("api")
        await has_heard(api, heard, times)
    assert heard.count(engine) == 1
    other.close()


async def test_ringing_the_absent_is_no_error(home: Path) -> None:
    engine = SocketBell.bind(home, "engine")
    engine.ring("api")
    engine.close()
    api = SocketBell.bind(home, "api")
    api.ring("engine")
    api.close()
    assert list(user_directory(Path("/tmp"), home).iterdir()) == []


async def test_the_socket_of_a_dead_api_process_is_removed(home: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from skyrl_tinker.store.doorbell import SocketBell\n"
        "SocketBell.bind(Path(sys.argv[1]), 'api'); os._exit(0)"
    )
    engine = SocketBell.bind(home, "engine")
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", program, str(home)], check=True)
    place = user_directory(Path("/tmp"), home)
    assert len(list(place.glob("api-*.sock"))) == 1
    api = SocketBell.bind(home, "api")
    engine.ring("api")
    assert await api.wait(PATIENCE_S)
    assert len(list(place.glob("api-*.sock"))) == 1
    engine.close()
    api.close()


async def test_a_ring_leaves_the_notes_of_api_processes(home: Path) -> None:
    engine = SocketBell.bind(home, "engine")
    note = user_directory(Path("/tmp"), home) / f"api-{os.getpid()}.listens"
    note.touch()
    engine.ring("api")
    assert note.exists()
    engine.close()


async def test_a_new_engine_takes_over_the_socket_of_a_dead_one(home: Path) -> None:
    first = SocketBell.bind(home, "engine")
    second, api = SocketBell.bind(home, "engine"), SocketBell.bind(home, "api")
    api.ring("engine")
    assert await second.wait(PATIENCE_S)
    for bell in (second, first, api):
        bell.close()


async def test_homes_do_not_hear_each_other(home: Path) -> None:
    other_home = home / "other"
    engine, api = SocketBell.bind(home, "engine"), SocketBell.bind(other_home, "api")
    api.ring("engine")
    assert not await is_rung(engine)
    engine.close()
    api.close()
    user_directory(Path("/tmp"), other_home).rmdir()


async def test_the_directory_is_private_and_paths_are_short(tmp_path: Path) -> None:
    home = tmp_path / ("long" * 60)
    api = SocketBell.bind(home, "api")
    place = user_directory(Path("/tmp"), home)
    assert place.stat().st_mode & 0o777 == 0o700
    assert len(str(place / "api-4194304.sock")) < 107
    api.close()
    place.rmdir()

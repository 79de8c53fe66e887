"""The doorbell wakes at once, counts nothing, and never gets in the way of who rings."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skyrl_tinker.store.cluster.doorbells import bind_doorbell
from skyrl_tinker.store.doorbell import Doorbell, Role, SocketBell
from skyrl_tinker.user_directory import user_directory
from tests.store.support.databases import on_postgresql
from tests.support.postgres import Postgres

PATIENCE_S = 20.0


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    place = user_directory(Path("/tmp"), tmp_path)
    if place.exists():
        for left in place.iterdir():
            left.unlink()
        place.rmdir()


@pytest.fixture
def bells(url: str, home: Path) -> Iterator[Callable[[Role], Doorbell]]:
    """Bells of the processes of one server, on either kind of database."""
    bound: list[Doorbell] = []

    def bind(role: Role) -> Doorbell:
        bound.append(bind_doorbell(url, home, role))
        return bound[-1]

    yield bind
    for bell in bound:
        bell.close()


async def silent(bell: Doorbell) -> None:
    """Hear all that rang so far: a connection that is new wakes its process once."""
    while await bell.wait(0.3):
        pass


async def test_a_ring_wakes_at_once(bells: Callable[[Role], Doorbell]) -> None:
    engine, api = bells("engine"), bells("api")
    await silent(engine)
    await silent(api)
    for ringing, role, woken in ((api, "engine", engine), (engine, "api", api), (api, "api", api)):
        waiting = asyncio.create_task(woken.wait(PATIENCE_S))
        await asyncio.sleep(0.05)
        ringing.ring(role)
        assert await waiting


async def test_many_rings_are_few(bells: Callable[[Role], Doorbell]) -> None:
    engine, api = bells("engine"), bells("api")
    await silent(engine)
    for _ in range(1000):
        api.ring("engine")
    heard = 0
    while await engine.wait(0.3):
        heard += 1
    assert 1 <= heard < 500
    api.ring("engine")
    assert await engine.wait(PATIENCE_S)


async def test_rings_before_the_first_wait_are_kept(bells: Callable[[Role], Doorbell]) -> None:
    engine, api = bells("engine"), bells("api")
    await asyncio.sleep(0.2)
    api.ring("engine")
    await asyncio.sleep(0.2)
    assert await engine.wait(PATIENCE_S)


@on_postgresql
async def test_a_bell_whose_connection_is_cut_rings_again(
    bells: Callable[[Role], Doorbell], postgres: Postgres
) -> None:
    engine, api = bells("engine"), bells("api")
    await silent(engine)
    postgres.stop("immediate")
    api.ring("engine")
    postgres.start()
    assert await engine.wait(PATIENCE_S), "it may have missed a ring"
    await silent(engine)
    await silent(api)
    api.ring("engine")
    assert await engine.wait(PATIENCE_S)
    engine.ring("api")
    assert await api.wait(PATIENCE_S)


@on_postgresql
async def test_a_bell_closes_while_its_database_is_away(
    bells: Callable[[Role], Doorbell], postgres: Postgres
) -> None:
    engine = bells("engine")
    await silent(engine)
    postgres.stop()
    try:
        assert not await engine.wait(0.3)
        engine.ring("api")
    finally:
        postgres.start()


@on_postgresql
def test_a_bell_rings_on_after_its_loop_has_ended(bells: Callable[[Role], Doorbell]) -> None:
    """An exception in its thread would fail this test."""
    engine = bells("engine")
    asyncio.run(silent(engine))
    engine.ring("engine")
    time.sleep(0.5)


@on_postgresql
async def test_databases_of_one_server_do_not_hear_each_other(
    bells: Callable[[Role], Doorbell], postgres: Postgres, tmp_path: Path
) -> None:
    engine, other = bells("engine"), bind_doorbell(postgres.new_database(), tmp_path, "api")
    await silent(engine)
    await silent(other)
    other.ring("engine")
    assert not await engine.wait(0.3)
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
    assert not await engine.wait(0.05)
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

"""The doorbell wakes at once, counts nothing, and never gets in the way of who rings."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.user_directory import user_directory


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    place = user_directory(Path("/tmp"), tmp_path)
    if place.exists():
        for left in place.iterdir():
            left.unlink()
        place.rmdir()


async def test_a_ring_wakes_at_once(home: Path) -> None:
    engine, api = Doorbell.bind(home, "engine"), Doorbell.bind(home, "api")
    waiting = asyncio.create_task(engine.wait(5))
    await asyncio.sleep(0.05)
    rung = time.perf_counter()
    api.ring("engine")
    assert await waiting
    assert time.perf_counter() - rung < 0.5
    engine.ring("api")
    assert await api.wait(1)
    engine.close()
    api.close()


async def test_many_rings_are_one(home: Path) -> None:
    engine, api = Doorbell.bind(home, "engine"), Doorbell.bind(home, "api")
    for _ in range(1000):
        api.ring("engine")
    assert await engine.wait(1)
    assert not await engine.wait(0.05)
    api.ring("engine")
    assert await engine.wait(1)
    engine.close()
    api.close()


async def test_rings_before_the_first_wait_are_kept(home: Path) -> None:
    engine, api = Doorbell.bind(home, "engine"), Doorbell.bind(home, "api")
    api.ring("engine")
    await asyncio.sleep(0.05)
    assert await engine.wait(1)
    engine.close()
    api.close()


async def test_ringing_the_absent_is_no_error(home: Path) -> None:
    engine = Doorbell.bind(home, "engine")
    engine.ring("api")
    engine.close()
    api = Doorbell.bind(home, "api")
    api.ring("engine")
    api.close()
    assert list(user_directory(Path("/tmp"), home).iterdir()) == []


async def test_the_socket_of_a_dead_api_process_is_removed(home: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from skyrl_tinker.store.doorbell import Doorbell\n"
        "Doorbell.bind(Path(sys.argv[1]), 'api'); os._exit(0)"
    )
    engine = Doorbell.bind(home, "engine")
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", program, str(home)], check=True)
    place = user_directory(Path("/tmp"), home)
    assert len(list(place.glob("api-*.sock"))) == 1
    api = Doorbell.bind(home, "api")
    engine.ring("api")
    assert await api.wait(1)
    assert len(list(place.glob("api-*.sock"))) == 1
    engine.close()
    api.close()


async def test_a_new_engine_takes_over_the_socket_of_a_dead_one(home: Path) -> None:
    first = Doorbell.bind(home, "engine")
    second, api = Doorbell.bind(home, "engine"), Doorbell.bind(home, "api")
    api.ring("engine")
    assert await second.wait(1)
    for bell in (second, first, api):
        bell.close()


async def test_homes_do_not_hear_each_other(home: Path) -> None:
    other_home = home / "other"
    engine, api = Doorbell.bind(home, "engine"), Doorbell.bind(other_home, "api")
    api.ring("engine")
    assert not await engine.wait(0.05)
    engine.close()
    api.close()
    user_directory(Path("/tmp"), other_home).rmdir()


async def test_the_directory_is_private_and_paths_are_short(tmp_path: Path) -> None:
    home = tmp_path / ("long" * 60)
    api = Doorbell.bind(home, "api")
    place = user_directory(Path("/tmp"), home)
    assert place.stat().st_mode & 0o777 == 0o700
    assert len(str(place / "api-4194304.sock")) < 107
    api.close()
    place.rmdir()

"""New work is refused while the disk is nearly full; what was accepted goes on, and all resumes."""

import errno
import shutil
import threading
from typing import NamedTuple
from unittest.mock import Mock

import pytest

from skyrl_tinker.api.middleware import disk_room
from tests.api.support.world import World
from tests.support.waiting import holding


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Free bytes of all disks, as a list of one."""
    left = [10**12]
    monkeypatch.setattr(disk_room, "LOOK_S", 0.0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 10**12 - left[0], left[0]))
    return left


async def test_new_work_waits_for_room_and_what_was_accepted_does_not(world: World, free: list[int]) -> None:
    session = await world.session()
    model = await world.model(session)
    step = {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 0.1}}
    accepted = (await world.ok("optim_step", step))["request_id"]
    free[0] = 250_000_000
    refused = await world.post("optim_step", {**step, "seq_id": 2})
    assert refused.status_code == 503
    assert (await world.post("optim_step%0A", {**step, "seq_id": 2})).status_code == 503, "the same route"
    assert int(refused.headers["retry-after"]) > 0
    assert "0.25 GB are free at" in refused.json()["detail"]
    assert "needs 1 GB (setting min_free_gb)" in refused.json()["detail"]
    await world.ok("session_heartbeat", {"session_id": session})
    await world.succeed(accepted, "application/json", b"{}")
    assert (await world.retrieve(accepted)).status_code == 200
    assert (await world.http.get("http://api/readyz")).json()["detail"].startswith("0.25 GB are free")
    free[0] = 10**12
    await world.ok("optim_step", {**step, "seq_id": 2})


async def test_a_file_system_that_is_away_stops_nobody(world: World, free: list[int]) -> None:
    await world.session()
    back = threading.Event()
    world.patch.setattr(disk_room, "PATIENCE_S", 0.01)
    world.patch.setattr(shutil, "disk_usage", lambda _: back.wait() and Usage(1, 1, 0))
    async with holding(back):
        for _ in range(3):
            await world.session()
        assert (await world.http.get("http://api/readyz")).status_code == 200
        assert "disk_free_bytes 1e+12" in (await world.http.get("http://api/metrics")).text


async def test_a_file_system_that_answers_with_an_error_stops_nobody(world: World, free: list[int]) -> None:
    free[0] = 250_000_000
    assert (await world.post("create_session", {"sdk_version": "0.38.0"})).status_code == 503
    free[0] = 10**12
    await world.session()
    world.patch.setattr(shutil, "disk_usage", Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
    await world.session()
    assert (await world.http.get("http://api/readyz")).status_code == 200


async def test_the_disk_is_looked_at_once_in_a_while(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[object] = []
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: (looks.append(path), usage(path))[1])
    for _ in range(20):
        await world.session()
    assert len(looks) <= 4

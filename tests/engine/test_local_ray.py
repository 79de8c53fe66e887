"""Real daemons of Ray, below a process of their own. Stopped ones are not up, however long one waits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_tinker import config
from skyrl_tinker.directories import Directories
from skyrl_tinker.engine import local_ray

pytestmark = pytest.mark.servers
LONG_S = 240.0
OFF = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}


def start(kind: str, signal: str, waits: list[float], times: int = 1, *settings: str) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr."""
    command = [sys.executable, "-m", "tests.engine.support.struck_ray", kind, signal, json.dumps(waits)]
    ended = subprocess.run(
        [*command, str(times), *settings], capture_output=True, text=True, env={**os.environ, **OFF}
    )
    return ended.returncode, ended.stdout, ended.stderr


def test_ray_is_a_gcs_and_a_raylet_with_stand_ins_for_its_agents() -> None:
    _, found, _ = start("none", "SIGSTOP", [LONG_S])
    gcs, raylet, *agents = json.loads(found)
    assert "gcs/gcs_server" in gcs
    assert "raylet/raylet" in raylet
    assert [agent[: len(f"sh -c {local_ray.AGENT}")] for agent in agents] == [f"sh -c {local_ray.AGENT}"] * 2


@pytest.mark.parametrize("kind", ["gcs_server", "raylet"])
def test_where_ray_is_not_up_in_time_it_is_started_again(kind: str) -> None:
    """The first try has too little time for a stopped process only, or, on a slow machine, for both."""
    code, found, said = start(kind, "SIGSTOP", [5.0, LONG_S, LONG_S])
    assert code == 0, said
    assert "trying again: Ray was not up within 5 s, at a load of" in said
    assert len(json.loads(found)) == 4  # nothing is left of the first try


@pytest.mark.parametrize("kind", ["gcs_server", "raylet"])
def test_where_a_process_of_ray_ends_it_is_started_again(kind: str) -> None:
    code, found, said = start(kind, "SIGKILL", [5.0, LONG_S, LONG_S])
    assert code == 0, said
    assert f"its {kind} (exit code -9) ended" in said
    assert len(json.loads(found)) == 4


@pytest.mark.parametrize(("signal", "code"), [("SIGSTOP", os.EX_TEMPFAIL), ("SIGKILL", 1)])
def test_an_engine_tells_that_ray_had_too_little_time_from_that_it_cannot_run(
    tmp_path: Path, signal: str, code: int
) -> None:
    settings = config.load(home=tmp_path)
    Directories(settings).make()
    file = tmp_path / "settings.json"
    file.write_text(settings.model_dump_json())
    found, _, said = start("gcs_server", signal, [1.0, 2.0], 2, str(file))
    assert found == code
    assert said.count("trying again") == 1
    assert "ended: Ray " in said.splitlines()[-1]

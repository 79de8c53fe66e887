"""scripts/test leaves out no test but the long ones, excuses little, and scripts/proofs runs the others."""

import asyncio
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from tiers import changed, running, verdict
from tiers.jobs import ROOT, Job, deterministic_jobs, pytest_job, server_jobs
from tiers.proofs import package_table, proofs
from tiers.running import run, run_all
from tiers.verdict import Case

from tests.engine.support.simulation import simulate
from tests.support.clock import noted_sleeps

FAR_S = 600.0
FLAKY_TEST = """
from pathlib import Path
import pytest

HERE = Path(__file__)

def fails_once(name, error):
    if not (mark := HERE.with_name(name)).exists():
        mark.touch()
        raise error

def test_comes_late():
    fails_once("late", TimeoutError("not within 240 s"))

def test_is_off_by_a_bit():
    fails_once("number", AssertionError("0.1 != 0.2"))

def test_never_comes():
    raise TimeoutError("not within 240 s")

@pytest.fixture(scope="module")
def server():
    fails_once("server", ConnectionError("it did not start"))

@pytest.mark.parametrize("number", range(5))
def test_has_a_server(server, number):
    pass

def test_is_skipped():
    pytest.skip("no bread")
"""


def _paths(jobs: Sequence[Job]) -> set[Path]:
    return {ROOT / each for job in jobs for each in job.command if each.startswith("tests/")}


def test_all_tests_are_looked_at(tmp_path: Path) -> None:
    """conftest.py sees to it that those with servers lie where the jobs of servers look."""
    seen = _paths([*deterministic_jobs(tmp_path), *server_jobs(tmp_path)])
    files = {path for path in (ROOT / "tests").rglob("test_*.py") if "cookbook" not in path.parts}
    assert not {path for path in files if not {path, *path.parents} & seen}


def test_what_the_proofs_run_and_cover_exists() -> None:
    for proof in proofs().values():
        ran = [*proof.tests, *(shlex.split(command)[0] for command in proof.commands)]
        assert ran
        assert not [path for path in ran if not (ROOT / path).exists()]
        covered = [*(f"skyrl_tinker/{each}" for each in proof.packages), *proof.paths]
        assert covered
        assert not [path for path in covered if not (ROOT / path).exists()]


def test_a_change_names_the_proofs_of_its_package() -> None:
    about = {name for name, proof in proofs().items() if proof.is_about("skyrl_tinker/storage/s3.py")}
    assert {"object-storage", "cluster"} <= about
    assert not {"families", "dashboard"} & about
    assert proofs()["wheel"].is_about("examples/rl_loop.py")
    assert proofs()["soak"].is_about("tests/faults/test_soak.py")


def test_contributing_tells_the_proofs_of_each_package() -> None:
    """As scripts/proofs --packages prints them."""
    assert package_table() in (ROOT / "CONTRIBUTING.md").read_text()


def test_a_changed_module_names_the_tests_that_reach_it() -> None:
    found = changed.reached_tests(ROOT, ["skyrl_tinker/domain/tinker_path.py"])
    assert "tests/domain/test_tinker_path.py" in found
    assert "tests/training/losses/test_gspo.py" not in found
    below = changed.reached_tests(ROOT, ["tests/store/conftest.py"])
    assert "tests/store/test_doorbell.py" in below
    assert "tests/domain/test_tinker_path.py" not in below


@pytest.fixture
def failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Case]:
    """Those of a run of FLAKY_TEST, by the names of their tests."""
    monkeypatch.setattr(verdict, "FLAKY", tmp_path / "flaky.jsonl")
    (file := tmp_path / "test_flaky.py").write_text(FLAKY_TEST)
    (tmp_path / "pytest.ini").write_text("[pytest]")
    monkeypatch.setattr(running, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p tests.support.records")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # which saves most of the time
    job = pytest_job("servers: some", tmp_path, file.name)
    assert run(job, tmp_path, time.monotonic() + FAR_S).code == 1
    assert job.record is not None
    found = verdict.cases(job, verdict.read([job.record]))
    return {case.lines[0]["id"].partition("::")[2].partition("[")[0]: case for case in found}


def _again(cases: Sequence[Case], scratch: Path) -> tuple[int, int]:
    counted, excused = verdict.run_again(cases, scratch, time.monotonic() + FAR_S)
    return len(counted), len(excused)


def test_what_came_late_is_excused_once_and_noted(failures: dict[str, Case], tmp_path: Path) -> None:
    late = failures["test_comes_late"]
    assert _again([late], tmp_path) == (0, 1)
    (noted,) = verdict.read([verdict.FLAKY])
    assert noted["id"] == late.lines[0]["id"]
    assert noted["error"] == "TimeoutError: not within 240 s"
    assert _again([late], tmp_path) == (1, 0), "the same one is not excused again"


def test_what_never_comes_counts(failures: dict[str, Case], tmp_path: Path) -> None:
    assert _again([failures["test_never_comes"]], tmp_path) == (1, 0)


def test_a_number_is_never_excused(failures: dict[str, Case], tmp_path: Path) -> None:
    assert _again([failures["test_is_off_by_a_bit"]], tmp_path) == (1, 0)


def test_nor_is_what_has_no_servers(failures: dict[str, Case], tmp_path: Path) -> None:
    (line,) = failures["test_comes_late"].lines
    assert _again([Case(Job("store", ()), (line,))], tmp_path) == (1, 0)


def test_all_tests_of_a_server_that_did_not_start_are_one_failure(
    failures: dict[str, Case], tmp_path: Path
) -> None:
    case = failures["test_has_a_server"]
    assert len(case.lines) == 5
    assert _again([case], tmp_path) == (0, 1)


def test_more_than_two_are_excused_in_no_run(failures: dict[str, Case], tmp_path: Path) -> None:
    late = failures["test_comes_late"]
    assert _again([late] * (verdict.MOST + 1), tmp_path) == (verdict.MOST + 1, 0)


def test_a_skip_counts_in_ci(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"id": "a", "outcome": "skipped", "error": "no bread"}]
    monkeypatch.delenv("CI", raising=False)
    assert not verdict.skipped_in_vain(lines)
    monkeypatch.setenv("CI", "true")
    assert verdict.skipped_in_vain(lines) == lines
    assert not verdict.skipped_in_vain([lines[0] | {"error": f"it {verdict.ALLOWED_SKIPS[0]}"}])


def test_a_job_that_hangs_is_ended(tmp_path: Path) -> None:
    (ended,) = run_all([Job("hangs", ("sleep", "600"))], tmp_path, time.monotonic())
    assert ended.code != 0
    assert ended.seconds < FAR_S


def test_a_test_that_sleeps_is_named_and_one_on_virtual_time_is_not() -> None:
    async def sleep(delay_s: float) -> None:
        await asyncio.sleep(delay_s)

    with noted_sleeps() as slept:
        asyncio.run(sleep(0))
        simulate(sleep(3600))
        assert not slept
        time.sleep(0.001)
        asyncio.run(sleep(0.001))
    assert [line.rpartition(" sleeps ")[2] for line in slept] == ["0.001 s"] * 2
    assert all(__file__ in line for line in slept)

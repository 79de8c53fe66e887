"""`skyrl-tinker follow`: numbers of a script's metrics.jsonl reach its run, through a real API process."""

import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from skyrl_tinker.cli import metrics_file, running_server
from skyrl_tinker.cli.commands import app
from skyrl_tinker.cli.metrics_file import Record, records
from skyrl_tinker.errors import StartupError
from skyrl_tinker.store.store import Store
from tests.api.support.process import launched_on
from tests.api.support.world import write_facts
from tests.store.support.rows import create, new_session

NAN, HUGE = float("nan"), 10**400


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """URL of a server, and its runs: the one that was used last is the last."""
    with launched_on(tmp_path / "home", _two_runs) as (api, runs):
        yield api.url, runs


async def _two_runs(store: Store) -> list[str]:
    await write_facts(store)
    return [str((await create(store, await new_session(store))).model_id) for _ in range(2)]


def log_of(directory: Path, *lines: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def reported(url: str, run: str) -> list[tuple[int, Any]]:
    answer = httpx.get(f"{url}/api/v1/console/runs/{run}/metrics").raise_for_status().json()
    return [(each["step"], each["values"]) for each in answer["reports"]]


def follow(url: str, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["follow", *arguments, "--once", "--url", url])
    return result.output if result.exit_code == 0 else f"exit code {result.exit_code}: {result.stderr}"


def test_all_numbers_of_a_log_reach_the_run_of_its_checkpoint(
    served: tuple[str, list[str]], tmp_path: Path
) -> None:
    url, (first, last) = served
    many = {f"env/{number}": float(number) for number in range(100)}
    log = log_of(tmp_path / "log", {"step": 0, "env/all/reward/total": 0.5, "name": "x"}, {"step": 1, **many})
    assert f"reported to run {last}" in follow(url, str(log))
    (log / "checkpoints.jsonl").write_text(json.dumps({"state_path": f"tinker://{first}/weights/a"}) + "\n")
    assert f"reported to run {first}" in follow(url, str(log))
    for run in (first, last):
        (zero, values), *rest = reported(url, run)
        assert (zero, values) == (0, {"env/all/reward/total": 0.5})
        assert {name: value for _, part in rest for name, value in part.items()} == many
        assert {step for step, _ in rest} == {1}


def test_a_run_that_goes_on_from_the_one_of_the_last_checkpoint_is_found_once_that_is_silent(
    tmp_path: Path,
) -> None:
    """As of a script that was killed and resumes: it has no checkpoint of its own yet."""
    log = log_of(tmp_path / "log", {"step": 0, "reward": 0.5})
    (log / "checkpoints.jsonl").write_text(json.dumps({"state_path": "tinker://killed/weights/a"}) + "\n")
    os.utime(log / "metrics.jsonl", (300, 300))
    asked: list[int] = []

    def found(killed: dict[str, Any], *heirs: dict[str, Any]) -> str | None:
        signs = {"last_heartbeat_at": 100, "last_request_at": 100} | killed
        runs = [_run("killed", parent=None, **signs), *(_run(**each) for each in heirs)]
        last_first = sorted(runs, key=lambda run: str(run["last_request_at"]), reverse=True)

        def last_used(most: int) -> dict[str, Any]:
            asked.append(most)
            return {"runs": last_first[:most]}

        server: Any = SimpleNamespace(runs=last_used)
        return metrics_file.run_of(log / "metrics.jsonl", server)

    heir = {"run_id": "resumed", "parent": "killed", "created_at": 200, "steps": 1}
    assert found({}) == "killed"
    assert found({}, heir) == "resumed"
    assert found({}, heir, heir | {"run_id": "again", "created_at": 250}) == "again"
    assert found({}, heir | {"steps": 0}) == "killed"  # an export, or not yet
    assert found({}, heir | {"parent": "another"}) == "killed"
    assert found({}, heir | {"created_at": 400}) == "killed"  # the log is older
    for sign in ("last_heartbeat_at", "last_request_at"):  # it lives: the other one is another script's
        assert found({sign: 250}, heir) == "killed"
    asked.clear()
    assert found({"last_request_at": 350}, heir) == "killed"
    assert asked == [1]  # as at each step of a script that is not resumed


def _run(run_id: str, **facts: Any) -> dict[str, Any]:
    signs = {"created_at": 50, "last_heartbeat_at": 300, "last_request_at": 300, "steps": 5} | facts
    moments = {
        name: datetime.fromtimestamp(at, UTC).isoformat() for name, at in signs.items() if "_at" in name
    }
    return {"run_id": run_id, **signs, **moments}


def test_what_follows_goes_to_the_run_that_writes_it(
    served: tuple[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, (first, last) = served
    log, found = log_of(tmp_path / "log", {"step": 7, "reward": 1.0}), iter([first, last])
    monkeypatch.setattr(metrics_file, "run_of", lambda *_: next(found))
    assert f"from now on reported to run {last}" in follow(url, str(log))
    assert not reported(url, first)
    assert [step for step, _ in reported(url, last)] == [7]


def test_a_log_that_is_not_there_and_a_run_that_is_not_known_are_named(
    served: tuple[str, list[str]], tmp_path: Path
) -> None:
    url, _ = served
    assert "found no metrics.jsonl" in follow(url, str(tmp_path / "none"))
    told = f"expected the id of one of {url} (`skyrl-tinker runs`)"
    log = log_of(tmp_path / "log")  # a script's first step may take long
    (log / "checkpoints.jsonl").write_text('{"state_path": "tinker://elsewhere/weights/a"}\n')
    assert f"{log / 'checkpoints.jsonl'}: found run elsewhere, {told}" in follow(url, str(log))
    for directory in (log, tmp_path / "none"):
        refusal = follow(url, str(directory), "--run", "nobody")
        assert refusal.startswith("exit code 1: ")
        assert f"--run: found run nobody, {told}" in refusal


def test_a_log_that_is_not_there_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a script that was just started; its directory may be there before the file."""
    waits = iter([lambda: (tmp_path / "log").mkdir(), lambda: log_of(tmp_path / "log", {"step": 0})])
    monkeypatch.setattr(metrics_file, "time", SimpleNamespace(sleep=lambda _: next(waits)()))
    file = metrics_file.metrics_file(tmp_path / "log", on=True)
    assert file == tmp_path / "log" / "metrics.jsonl"
    assert capsys.readouterr().err.count("not there yet") == 1


def test_a_log_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that begins anew is another run."""
    monkeypatch.setattr(metrics_file, "POLL_S", 0.0)
    file = log_of(tmp_path / "log", {"step": 0, "reward": 0.0}) / "metrics.jsonl"
    following = records(file, on=True)
    assert next(following).step == 0
    file.unlink()
    with pytest.raises(StartupError, match=r"metrics\.jsonl: it is gone"):
        next(following)


def test_lines_that_are_no_records_and_values_that_are_no_numbers_are_passed_over(tmp_path: Path) -> None:
    lines = [[], {"reward": 1.0}, {"step": "1", "reward": 1.0}, {"step": -1, "reward": 1.0}, {"step": 2}]
    odd = {"step": 3, "a": True, "b": None, "c": NAN, "d": HUGE, "e" * 129: 1.0, "": 1.0, "f\0": 1.0, "g": 7}
    log = log_of(tmp_path / "log", *lines, odd)
    with (log / "metrics.jsonl").open("a") as file:
        file.write("{cut off")
    assert list(records(log / "metrics.jsonl", on=False)) == [Record(3, {"g": 7})]


def test_records_are_followed_as_they_are_written_and_again_when_a_script_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_file, "POLL_S", 0.0)
    file = log_of(tmp_path / "log", {"step": 0, "reward": 0.0}, {"step": 1, "reward": 0.25}) / "metrics.jsonl"
    following = records(file, on=True)
    assert [next(following).step for _ in range(2)] == [0, 1]
    with file.open("a") as opened:
        opened.write('{"step": 2, ')
        opened.flush()
        opened.write('"reward": 0.5}\n')
    assert next(following) == Record(2, {"reward": 0.5})
    log_of(file.parent, {"step": 0, "reward": 0.0})
    assert next(following) == Record(0, {"reward": 0.0})


def test_a_server_that_is_away_is_told_once_and_waited_for(
    served: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url, (run, _) = served
    real, tries = running_server.at(url), 3

    def report(*arguments: Any) -> None:
        nonlocal tries
        tries -= 1
        (running_server.at("http://127.0.0.1:9") if tries > 0 else real).report(*arguments)

    monkeypatch.setattr(metrics_file, "AWAY_S", 0.0)
    away = SimpleNamespace(report=report)
    metrics_file.report(away, run, Record(1, {"reward": 0.5}))  # type: ignore[arg-type]
    assert reported(url, run) == [(1, {"reward": 0.5})]
    assert capsys.readouterr().err.count("no server answers at http://127.0.0.1:9") == 1

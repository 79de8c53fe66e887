"""`skyrl-tinker checkpoints` and `usage --days`, through a real API process."""

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import Connection, update
from typer.testing import CliRunner

from skyrl_tinker.cli import running_server
from skyrl_tinker.cli.commands import app
from skyrl_tinker.domain.ids import CheckpointKind, RequestKind
from skyrl_tinker.store import api_keys, checkpoint_records, server_state
from skyrl_tinker.store.checkpoint_records import NewCheckpoint
from skyrl_tinker.store.database.tables import SavedCheckpoint, UsageRecord
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.store import Store
from tests.api.support.process import launched_on
from tests.api.support.world import write_facts
from tests.store.support.rows import create, new_session

NAMES = "old", "new"
USED = datetime(2026, 3, 1, 12, tzinfo=UTC), datetime(2026, 3, 1, 13, tzinfo=UTC)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    with serving(tmp_path / "home") as (url, runs, _):
        yield url, runs


@contextmanager
def serving(home: Path, *owners: str) -> Iterator[tuple[str, list[str], str]]:
    """URL of a server, and two runs, each with a checkpoint of 40 days and one of now.

    They are of these two owners, if any; then there is an admin key.
    """
    with launched_on(home, partial(_fill, owners)) as (api, (runs, root)):
        yield api.url, runs, root


async def _fill(owners: Sequence[str], store: Store) -> tuple[list[str], str]:
    await write_facts(store)
    await store.write(lambda conn: server_state.put(conn, "engine", {"state": "ready", "detail": ""}))
    runs = []
    for place in range(2):
        runs.append(await create(store, await new_session(store)))
        for owner in owners[place : place + 1]:
            await store.write(lambda conn, owner=owner: api_keys.create(conn, owner))
            await store.write(lambda conn, owner=owner: api_keys.adopt(conn, owner, api_keys.NO_KEY))
    for run in runs:
        await store.write(lambda conn, run=run: _save(conn, run))
    root = await store.write(lambda conn: api_keys.create(conn, "root", admin=True)) if owners else ""
    return [str(run.model_id) for run in runs], root


def _save(conn: Connection, run: ModelRow) -> None:
    for name in NAMES:
        new = NewCheckpoint(
            model_key=run.key,
            kind=CheckpointKind.WEIGHTS,
            name=name,
            directory="/nowhere",
            base_model="tiny",
            spec=run.spec,
            size_bytes=5 * 10**8,
        )
        checkpoint_records.add(conn, new, replace=False)
    old = SavedCheckpoint.created_at - 40 * 86400
    conn.execute(update(SavedCheckpoint).where(SavedCheckpoint.name == "old").values(created_at=old))
    for at in USED:
        used = {"hour": int(at.timestamp() // 3600), "session_id": run.session_id, "base_model": "tiny"}
        tokens = {"input_tokens": 70, "cached_tokens": 0, "output_tokens": 0}
        conn.execute(
            UsageRecord.__table__.insert().values(**used, kind=RequestKind.FORWARD_BACKWARD, **tokens)
        )


def run_command(url: str, *arguments: str, answer: str = "") -> str:
    result = CliRunner().invoke(app, [*arguments, "--url", url], input=answer)
    return result.output if result.exit_code == 0 else f"exit code {result.exit_code}: {result.output}"


def listed(url: str, *filters: str) -> list[str]:
    lines = run_command(url, "checkpoints", "list", *filters).splitlines()
    return [line.split()[0] for line in lines if line.startswith("tinker://")]


def test_checkpoints_are_listed_and_deleted_by_run_and_age(
    served: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_server, "MOST_LISTED", 3)  # two pages
    url, (first, second) = served
    of = {run: [f"tinker://{run}/weights/{name}" for name in NAMES] for run in (first, second)}
    assert listed(url) == [of[first][0], of[second][0], of[first][1], of[second][1]]
    assert listed(url, "--run", first) == of[first]
    assert listed(url, "--older-than", "30d") == [of[first][0], of[second][0]]
    assert "4 checkpoints, 2.000 GB" in run_command(url, "checkpoints", "list")
    refused = run_command(url, "checkpoints", "delete", "--older-than", "30d", answer="n\n")
    assert "delete 2 checkpoints of local?" in refused
    assert len(listed(url)) == 4
    assert "deleted: 2" in run_command(url, "checkpoints", "delete", "--older-than", "30d", answer="y\n")
    assert listed(url) == [of[first][1], of[second][1]]
    gone, there = of[first]
    assert "deleted: 1" in run_command(url, "checkpoints", "delete", gone, there, "--yes")
    assert listed(url) == [of[second][1]]


def test_an_admin_sees_whose_checkpoints_it_deletes_and_may_choose_an_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path / "home", "alice", "bob") as (url, (first, second), root):
        monkeypatch.setenv("TINKER_API_KEY", root)
        of = {run: [f"tinker://{run}/weights/{name}" for name in NAMES] for run in (first, second)}
        rows = [line.split() for line in run_command(url, "checkpoints", "list").splitlines()]
        owners = {row[0]: row[1] for row in rows if row and row[0].startswith("tinker://")}
        assert owners == dict.fromkeys(of[first], "alice") | dict.fromkeys(of[second], "bob")
        old = "checkpoints", "delete", "--older-than", "30d"
        assert "delete 2 checkpoints of alice, bob?" in run_command(url, *old, answer="n\n")
        told = run_command(url, *old, "--owner", "bob", answer="y\n")
        assert "delete 1 checkpoint of bob?" in told
        assert "deleted: 1" in told
        assert sorted(listed(url)) == sorted([*of[first], of[second][1]])
        assert listed(url, "--owner", "bob") == [of[second][1]]
        assert "deleted: 1" in run_command(url, "checkpoints", "delete", "--owner", "bob", "--yes")
        assert listed(url) == of[first]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "expected either paths, or one or more of --run, --owner and --older-than"),
        (["tinker://a/weights/b", "--older-than", "1d"], "expected either paths"),
        (["--older-than", "3months"], "found '3months', expected a number and a unit"),
        (["a", "--yes"], "'a' is not a checkpoint path"),
        (["tinker://a/weights/b", "a"], "exit code 1: skyrl-tinker: 'a' is not a checkpoint path"),
    ],
)
def test_a_deletion_of_nothing_or_of_a_wrong_path_is_refused_though_no_server_runs(
    arguments: list[str], told: str, tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, ["checkpoints", "delete", *arguments, "--home", str(tmp_path)])
    said = f"exit code {result.exit_code}: {result.output}"
    assert told in " ".join(said.replace("│", " ").split())


def test_usage_of_months_is_csv_by_day(served: tuple[str, list[str]]) -> None:
    url, _ = served
    days = (datetime.now(UTC) - USED[0]) // timedelta(days=1) + 2
    rows = list(csv.DictReader(run_command(url, "usage", "--days", str(days)).splitlines()))
    trained = [row for row in rows if row["kind"] == "trained tokens"]
    assert trained == [
        {
            "day": "2026-03-01",
            "owner": "local",
            "project": "",
            "base_model": "tiny",
            "kind": "trained tokens",
            "amount": "280",
        }
    ]
    assert {row["day"] for row in rows if row["kind"] == "checkpoints"} >= {f"{datetime.now(UTC):%Y-%m-%d}"}

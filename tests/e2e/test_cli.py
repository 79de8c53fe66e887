"""The commands of the unmodified `tinker` CLI that show and manage what is here."""

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tests.e2e.support.client import Client, random_tokens, train

ROOT = Path(__file__).parents[2]


def tinker_says(client: Client, home: Path, *commands: str) -> list[Any]:
    """What each command says, as JSON."""
    arguments = json.dumps([["-f", "json", *command.split()] for command in commands])
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.support.tinker_commands", arguments],
        cwd=ROOT,
        env={**os.environ, "HOME": str(home), "TINKER_BASE_URL": client.url, "TINKER_API_KEY": "tml-local"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(text) if text.startswith(("{", "[")) else text for text in json.loads(done.stdout)]


def test_runs_and_checkpoints_are_shown_and_managed(client: Client, tmp_path: Path) -> None:
    training = client.new_lora()
    train(training, random_tokens(20, seed=3))
    paths = [training.save_state(name).result().path for name in ("one", "two")]
    paths.append(training.save_weights_for_sampler("final").result().path)
    run = training.model_id
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    window = f"{(hour - timedelta(hours=1)).isoformat()} {(hour + timedelta(hours=2)).isoformat()}"
    runs, info, listed, of_run, first, bill, storage, models, version = tinker_says(
        client,
        tmp_path,
        "run list --limit 0",
        f"run info {run}",
        "checkpoint list --limit 0",
        f"checkpoint list --run-id {run}",
        f"checkpoint info {paths[0]}",
        f"billing usage {window}",
        "billing checkpoint-storage",
        "model list tin",
        "version",
    )
    assert run in [each["training_run_id"] for each in runs["runs"]]
    assert info["last_checkpoint"]["tinker_path"] == paths[1]
    assert set(paths) <= {each["tinker_path"] for each in listed["checkpoints"]}
    assert [each["tinker_path"] for each in of_run["checkpoints"]] == paths
    assert first["tinker_path"] == paths[0]
    assert {"training", "checkpoint", "storage"} <= {each["event_info"]["type"] for each in bill["data"]}
    assert storage["data"][0]["checkpoint_count"] >= 3
    assert "tiny" in [each["model_name"] for each in models["models"]]
    assert "0.38" in str(version)
    _, _, changed, _, _, back, _, left = tinker_says(
        client,
        tmp_path,
        f"checkpoint publish {paths[0]}",
        f"checkpoint set-ttl {paths[0]} --ttl 7200",
        f"checkpoint info {paths[0]}",
        f"checkpoint unpublish {paths[0]}",
        f"checkpoint set-ttl {paths[0]} --remove",
        f"checkpoint info {paths[0]}",
        f"checkpoint delete --run-id {run} --type weights --before 2999-01-01 --yes",
        f"checkpoint list --run-id {run}",
    )
    assert changed["public"] is True
    assert changed["expires_at"] is not None
    assert (back["public"], back["expires_at"]) == (False, None)
    assert [each["tinker_path"] for each in left["checkpoints"]] == paths[2:]

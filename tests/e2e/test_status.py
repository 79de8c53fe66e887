"""Commands about a running server, as its owner types them."""

import json
import os
import subprocess
import sys
import time

import pytest
import tinker

from tests.e2e.support.client import Client, random_tokens, train
from tests.support.serve import Serve


def _run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
    command = [sys.executable, "-m", "skyrl_tinker", *arguments]
    return subprocess.run(
        command, env=environment | variables, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_server_says_what_it_serves_and_how_clients_reach_it(server: Serve) -> None:
    assert server.process.stdout is not None
    lines = [server.process.stdout.readline() for _ in range(6)]
    told = {line[:12].strip(): line[13:].strip() for line in lines}
    assert told["model"] == "tiny, 4096 tokens of context, adapters up to rank 64"
    assert told["runs on"] == "cpu in float32: trainer ranks 1, samplers 1, side by side"
    assert told["home"] == f"{server.home}, logs in {server.home / 'logs'}"
    assert told["API keys"].startswith("none, so whoever is on this machine may use it")
    assert told["dashboard"] == f"{server.url}/"
    assert told["clients"] == f"export TINKER_BASE_URL={server.url} TINKER_API_KEY=tml-local"


def test_status_is_found_by_the_home_and_by_url(server: Serve) -> None:
    by_home = _run("status", "--home", str(server.home))
    assert by_home.stdout.startswith("ready     tiny on cpu, 4096 tokens\n"), by_home.stderr
    assert "\ntrainer   " in by_home.stdout
    found = json.loads(_run("status", "--json", TINKER_BASE_URL=server.url).stdout)
    assert [each["base_model"] for each in found["server"]["base_models"]] == ["tiny"]
    assert found["ready"]


def test_ps_and_top_show_the_processes_and_replicas(server: Serve) -> None:
    shown = _run("ps", "--url", server.url).stdout
    for name in ("process ", "API ", "engine ", "trainer rank ", "base model "):
        assert f"\n{name}" in f"\n{shown}"
    assert "\npython" not in shown
    twice = _run("top", "--url", server.url, "--interval", "0.2", "--times", "2").stdout
    assert twice.count("ready     tiny") == twice.count("\nbase model ") == 2


def test_usage_adds_up_what_was_trained(client: Client) -> None:
    def trained() -> int:
        events = json.loads(_run("usage", "--url", client.url, "--json").stdout)["data"]
        infos = [event["event_info"] for event in events]
        return sum(info["token_count"] for info in infos if info["type"] == "training")

    before = trained()
    train(client.new_lora(), random_tokens(33, seed=8))
    assert trained() == before + 32
    assert "trained tokens" in _run("usage", "--url", client.url).stdout


def test_runs_are_listed_with_their_metadata(client: Client) -> None:
    pending = client.service.create_lora_training_client(
        base_model=client.model, rank=8, user_metadata={"recipe": "sums"}
    )
    run = pending.result().model_id
    (line,) = [line for line in _run("runs", "--url", client.url).stdout.splitlines() if run in line]
    assert "  ready  " in line
    assert line.endswith("recipe=sums")


def test_an_ended_session_leaves_the_trainer(server: Serve) -> None:
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-local")
    run = service.create_lora_training_client(base_model="tiny", rank=8).result().model_id
    ended = _run("end", run, "--home", str(server.home))
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    deadline = time.monotonic() + 60
    state = "ready"
    while state == "ready" and time.monotonic() < deadline:
        runs = json.loads(_run("runs", "--home", str(server.home), "--json").stdout)["runs"]
        (state,) = [each["state"] for each in runs if each["run_id"] == run]
    assert state == "released"
    missing = _run("end", "nothing", "--home", str(server.home))
    assert (missing.returncode, "no session nothing" in missing.stderr) == (1, True)


def test_logs_are_shown_by_part(server: Serve) -> None:
    shown = _run("logs", "--home", str(server.home), "--lines", "1")
    assert "engine: " in shown.stdout
    alone = _run("logs", "--home", str(server.home), "--part", "engine", "-n", "3")
    assert 1 <= len(alone.stdout.splitlines()) <= 3
    wrong = _run("logs", "--home", str(server.home), "--part", "nothing")
    assert wrong.returncode == 1
    assert "--part: found nothing, expected one of api, " in wrong.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
        (["--home", "/nowhere/at/all"], "no server has run with --home /nowhere/at/all"),
    ],
)
def test_a_server_that_is_not_there_is_one_line(arguments: list[str], message: str) -> None:
    ended = _run("status", *arguments)
    assert ended.returncode == 1
    assert message in ended.stderr
    assert ended.stderr.count("\n") == 1

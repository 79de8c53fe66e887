"""A server on PostgreSQL, whose copy takes over a while after a crash, and whose engine is killed.

To clients it is a longer wait, no more.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tinker import types

from tests.e2e.support.client import Client, prompt, random_tokens
from tests.faults.test_engine_death import kill_engine, rounds
from tests.support.postgres import Postgres, postgres_server
from tests.support.serve import HEAL_S, Serve, serving
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long

AWAY_S = 10


def test_work_goes_on_to_the_bit_after_the_database_was_away_and_the_engine_died(tmp_path: Path) -> None:
    with (
        postgres_server(durable=True) as postgres,
        postgres.copy() as copy,
        serving(tmp_path / "home", "--database-url", url(postgres, copy)) as server,
        Client.of(server.url) as client,
        ThreadPoolExecutor() as threads,
    ):
        assert not list(server.home.glob("*.db*")), "nothing is in SQLite"
        expected = rounds([client.new_lora()], 6)
        model = client.new_lora()
        before = rounds([model], 2)
        sampler = model.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=100, seed=5, temperature=1.0, stop=[])
        asked = [prompt(random_tokens(8, seed=seed)) for seed in range(20)]
        samples = [sampler.sample(each, 1, params).result().sequences[0].tokens for each in asked]

        postgres.stop("immediate")
        in_flight = [sampler.sample(each, 1, params) for each in asked]
        training = threads.submit(rounds, [model], 2, 2)
        _is_told(server, AWAY_S)
        copy.promote()
        assert [future.result(HEAL_S).sequences[0].tokens for future in in_flight] == samples
        assert [*before, *training.result(HEAL_S)] == expected[:4]

        kill_engine(server)
        assert rounds([model], 2, first=4) == expected[4:]
        wait_until(server.ready, HEAL_S)


def url(postgres: Postgres, copy: Postgres) -> str:
    postgres.new_database("journal", template="template1")
    return postgres.url_of_either(copy, "journal")


def _is_told(server: Serve, seconds: float) -> None:
    """While the database is away, requests are answered with when to send them again, not with a fault."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        answer = httpx.post(f"{server.url}/api/v1/create_session", json={"sdk_version": "0.38.0"}, timeout=60)
        assert answer.status_code == 503, answer.text
        assert answer.headers["Retry-After"] == "2"
        assert "the database failed, send this again" in answer.json()["detail"]
        time.sleep(1)


def test_a_database_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    server = Serve(tmp_path / "home", "--database-url", "postgresql+psycopg://u:hidden@127.0.0.1:9/none")
    _, complaint = server.process.communicate(timeout=300)
    assert server.process.returncode == 1
    assert "database_url" in complaint
    assert "Connection refused" in complaint
    assert "hidden" not in complaint
    assert complaint.count("\n") <= 2, "and one of PostgreSQL's own"

"""API processes as on other hosts: every one does everything, and may die."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import tinker
from sqlalchemy import Connection
from tinker import types

from skyrl_tinker.store import api_keys, server_state
from skyrl_tinker.store.store import write_once
from tests.e2e.support.client import Client, logprobs_of, metrics_of, prompt, random_tokens, train
from tests.faults.test_engine_death import TOKENS, rounds
from tests.support.api_host import api_host
from tests.support.postgres import postgres_server
from tests.support.serve import HEAL_S, Serve, serving
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long

PARAMS = types.SamplingParams(max_tokens=20, seed=5, temperature=1.0, stop=[])


def test_api_hosts_do_all_that_the_server_does_and_may_die(tmp_path: Path) -> None:
    with postgres_server(durable=True) as postgres:
        shared = ("--database-url", postgres.new_database(), "--checkpoints", str(tmp_path / "checkpoints"))
        home = tmp_path / "home"
        with (
            serving(home, *shared, "--engine-listen", "127.0.0.1:0") as server,
            api_host(tmp_path / "one", *shared[:2], secrets_of=home) as one,
            api_host(tmp_path / "other", *shared[:2], secrets_of=home) as other,
        ):
            first, second = one.wait_up().url, other.wait_up().url
            wait_until(lambda: all(map(_ready, (server.url, first, second))), 60)
            _train_and_die(first, second, one.process.kill)
            for host in (one, other):
                assert not re.findall("WARNING.*|ERROR.*|Traceback", host.complaints())
            _stand_still(server, second)
            _share_a_rate(shared[1], server.url, second)
        state: Any = write_once(shared[1], lambda conn: server_state.get(conn, "engine"))
        assert state["detail"] == "the server was stopped, none has started"


def _stand_still(server: Serve, host: str) -> None:
    """As when the server's machine is gone: nobody writes to the database that it is not ready."""
    engine = server.find("engine")
    assert engine is not None
    root = psutil.Process(server.process.pid)
    for process in (root, engine):
        process.suspend()
    wait_until(lambda: not _ready(host), 60)
    answer = httpx.get(f"{host}/readyz").json()
    assert (answer["state"], answer["detail"]) == ("ready", "the engine does not answer")
    for process in (engine, root):
        process.resume()
    wait_until(lambda: _ready(host), HEAL_S)


def _share_a_rate(database: str, first: str, second: str) -> None:
    def new_key(conn: Connection) -> str:
        key = api_keys.create(conn, "bob")
        api_keys.limit(conn, "bob", {"requests_per_s": 0.001})
        return key

    key = write_once(database, new_key)

    def status(url: str) -> int:
        return httpx.get(f"{url}/api/v1/sessions", headers={"X-API-Key": key}).status_code

    wait_until(lambda: status(first) == 200, 60)
    wait_until(lambda: status(second) == 429, 60)


def _ready(url: str) -> bool:
    return httpx.get(f"{url}/readyz").status_code == 200


def _train_and_die(first: str, second: str, kill: Callable[[], None]) -> None:
    with tinker.ServiceClient(base_url=first) as service:
        client = Client(first, service)
        expected = rounds([client.new_lora()], 3)
        training = client.new_lora()
        assert rounds([training], 1) == expected[:1]
        path = training.save_state("kept").result().path
        weights = training.save_weights_for_sampler("oai").result().path
        scored = logprobs_of(training, TOKENS).tolist()
        sampler = service.create_sampling_client(model_path=weights).result()
        tokens = sampler.sample(prompt(TOKENS[:8]), 1, PARAMS).result().sequences[0].tokens
        run, _, checkpoint = weights.removeprefix("tinker://").partition("/")
        signed = httpx.get(f"{first}/api/v1/training_runs/{run}/checkpoints/{checkpoint}/archive")
        for url in (first, second):
            archive = httpx.get(signed.headers["Location"].replace(first, url))
            assert len(archive.raise_for_status().content) > 1000, "signed by the secrets of all"
    _stream(first, weights)
    for url in (first, second):
        assert "skyrl_tinker_engine_up 1" in metrics_of(url)
        assert "skyrl_tinker_samples_in_flight" in metrics_of(url), "of the engine"
        now = httpx.get(f"{url}/api/v1/console/now").json()
        assert (now["ready"], len(now["replicas"])) == (True, 1)
        assert httpx.get(f"{url}/api/v1/tokenizer").status_code == 200
    kill()
    with tinker.ServiceClient(base_url=second) as service:
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        assert logprobs_of(resumed, TOKENS).tolist() == scored
        again = service.create_sampling_client(model_path=weights).result()
        assert again.sample(prompt(TOKENS[:8]), 1, PARAMS).result().sequences[0].tokens == tokens
        train(resumed, random_tokens(9, seed=3))
    _stream(second, weights)


def _stream(url: str, model: str) -> None:
    with openai.OpenAI(base_url=f"{url}/oai/api/v1", api_key="any", max_retries=0) as oai:
        chunks = list(oai.completions.create(model=model, prompt=TOKENS[:8], max_tokens=4, stream=True))
        assert chunks

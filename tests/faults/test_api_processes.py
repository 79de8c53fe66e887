"""Three API processes on one port, over TLS and on PostgreSQL: any answers for all, one may die, all may be
replaced.
"""

import os
import shutil
import signal
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import httpx
import openai
import psutil
import psycopg
import pytest
import tinker
from tinker import types

from tests.api.support.world import step
from tests.e2e.support.client import Client, prompt, random_tokens, train
from tests.faults.test_engine_death import TOKENS, rounds
from tests.support.certificates import write_certificate
from tests.support.postgres import Postgres
from tests.support.processes import title
from tests.support.serve import KINDS, Serve, serving
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long

COUNT, ROUNDS, SAMPLES = 3, 8, 40
T = TypeVar("T")
PARAMS = types.SamplingParams(max_tokens=60, seed=5, temperature=1.0, stop=[])
NO_FALLBACK = """
import sys
if "skyrl_tinker.api.api_process" in sys.orig_argv:
    from skyrl_tinker.api.waiting import long_poll
    long_poll._FALLBACK_POLL_S = 3600.0
"""
"""A module that makes API processes depend on the bell: without it a long poll ends after a second, too."""


@pytest.fixture(scope="module")
def database(postgres: Postgres) -> str:
    return postgres.new_database()


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory, database: str) -> Iterator[Serve]:
    directory = tmp_path_factory.mktemp("several")
    (directory / "sitecustomize.py").write_text(NO_FALLBACK)
    cert, key = write_certificate(directory)
    (directory / "renewed").mkdir()
    renewed, _ = write_certificate(directory / "renewed")
    trusted = directory / "trusted.pem"
    trusted.write_text(cert.read_text() + renewed.read_text())
    options = ("--api-processes", str(COUNT), "--database-url", database)
    options += ("--tls-cert", str(cert), "--tls-key", str(key))
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("PYTHONPATH", str(directory), prepend=os.pathsep)
        server = stack.enter_context(serving(directory / "home", *options))
        patch.setenv("SSL_CERT_FILE", str(trusted))
        wait_until(lambda: len(apis(server)) == COUNT)
        yield server


def apis(server: Serve) -> set[psutil.Process]:
    return {each for each in server.tree() if KINDS["API"] in title(each)}


@contextmanager
def client_of_each(server: Serve) -> Iterator[list[httpx.Client]]:
    """Clients with one kept connection each, to every API process one."""
    with ExitStack() as stack:
        found: dict[int, httpx.Client] = {}
        for _ in range(300):
            before = {each: peers(each, server) for each in apis(server)}
            client = stack.enter_context(httpx.Client(base_url=server.url, timeout=60))
            client.get("/healthz").raise_for_status()
            [process] = [each for each in before if peers(each, server) - before[each]]
            found.setdefault(process.pid, client)
            if len(found) == COUNT:
                break
        assert len(found) == COUNT
        yield list(found.values())


def peers(api: psutil.Process, server: Serve) -> set[int]:
    """Ports of its clients."""
    port = httpx.URL(server.url).port
    connections = [each for each in api.net_connections("tcp") if each.laddr.port == port]
    return {each.raddr.port for each in connections if each.status == psutil.CONN_ESTABLISHED}


def test_metrics_and_processes_are_the_same_whichever_process_answers(several: Serve) -> None:
    with client_of_each(several) as clients:
        before = answered(clients[0])
        for client in clients:
            for _ in range(20):
                client.get("/healthz").raise_for_status()
        wait_until(lambda: [answered(client) for client in clients] == [before + COUNT * 20] * COUNT)
        for client in clients:
            names = [each["name"] for each in client.get("/api/v1/console/now").json()["processes"]]
            assert sorted(name for name in names if name.startswith("API")) == ["API", "API 1", "API 2"]
    assert {each.name for each in (several.home / "logs").glob("api*.log")} == {
        "api.log",
        "api-1.log",
        "api-2.log",
    }


def answered(client: httpx.Client) -> float:
    text = client.get("/metrics").text
    [line] = [
        line
        for line in text.splitlines()
        if line.startswith("skyrl_tinker_http_request_seconds_count") and 'route="/healthz"' in line
    ]
    assert text.count("# TYPE skyrl_tinker_http_request_seconds ") == 1
    assert text.count("skyrl_tinker_engine_up 1.0") == 1
    return float(line.split()[-1])


def test_a_process_answers_long_polls_for_what_another_accepted(several: Serve) -> None:
    with client_of_each(several) as (first, second, third), ThreadPoolExecutor() as threads:
        request = {"request_id": create_model(first, second)["request_id"]}

        def poll(client: httpx.Client) -> str:
            answer = client.post("/api/v1/retrieve_future", json=request, timeout=90)
            return str(answer.raise_for_status().json()["type"])

        assert list(threads.map(poll, (first, second, third))) == ["create_model"] * COUNT


def create_model(first: httpx.Client, second: httpx.Client) -> Any:
    birth = {
        "session_id": ask(first, "create_session", {"sdk_version": "0.38.0"})["session_id"],
        "model_seq_id": 0,
        "base_model": Client.model,
        "lora_config": {"rank": 8},
    }
    return ask(second, "create_model", birth)


def ask(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    return client.post(f"/api/v1/{path}", json=body).raise_for_status().json()


def test_replaced_processes_answer_their_long_polls_with_408(several: Serve, database: str) -> None:
    with client_of_each(several) as clients, ThreadPoolExecutor() as threads:
        model = create_model(*clients[:2])["model_id"]
        with psycopg.connect(database.replace("+psycopg", "")) as conn:  # or the gap would soon be closed
            conn.execute("UPDATE sessions SET last_heartbeat_at = last_heartbeat_at - 60")
        request = {"request_id": ask(clients[2], "optim_step", step(model, 3))["request_id"]}

        def poll(client: httpx.Client) -> str:
            """Poll until the answer is not that the time of a poll is over."""
            reason = "waiting"
            while reason.startswith("waiting"):
                answer = client.post("/api/v1/retrieve_future", json=request, timeout=90)
                assert answer.status_code == 408
                reason = answer.json()["queue_state_reason"]
            return reason

        polls = [threads.submit(poll, client) for client in clients]
        time.sleep(0.5)
        before = apis(several)
        several.process.send_signal(signal.SIGUSR2)
        assert [each.result(90) for each in polls] == ["this server process is shutting down"] * COUNT
    wait_until_replaced(several, before)  # once their clients have closed


def test_clients_go_on_when_one_process_is_killed(several: Serve) -> None:
    def kill() -> None:
        before = apis(several)
        victim = min(before, key=lambda each: each.pid)
        victim.kill()
        wait_until(lambda: len(apis(several) - before) == 1)
        assert len(apis(several) & before) == COUNT - 1

    with client_of_each(several) as (one, *_):
        counted = answered(one)
    work_during(several, kill)
    with client_of_each(several) as clients:
        assert min(answered(client) for client in clients) >= counted, "of the dead one, too"


def test_a_rolling_restart_brings_a_renewed_certificate_and_loses_no_request(several: Serve) -> None:
    directory = several.home.parent
    log = several.home / "logs" / "api.log"

    def renew() -> None:
        before = apis(several)
        shutil.copy(directory / "renewed" / "key.pem", directory)
        several.process.send_signal(signal.SIGUSR2)
        wait_until(lambda: "ssl.SSLError" in log.read_text())
        assert apis(several) >= before, "none ends before there is another in its place"
        shutil.copy(directory / "renewed" / "cert.pem", directory)
        wait_until_replaced(several, before)

    with httpx.Client(base_url=several.url, timeout=60) as client:
        counted = answered(client)
    work_during(several, renew)
    url = httpx.URL(several.url)
    shown = {ssl.get_server_certificate((url.host, url.port or 0)) for _ in range(20)}
    assert shown == {(directory / "renewed" / "cert.pem").read_text()}
    with httpx.Client(base_url=several.url, timeout=60) as client:
        assert answered(client) >= counted, "of those that were replaced, too"
    for each in (several.home / "logs").glob("api*.log"):
        assert each.read_text().count("Traceback") == each.read_text().count("ssl.SSLError"), each


def replace(server: Serve) -> None:
    before = apis(server)
    server.process.send_signal(signal.SIGUSR2)
    wait_until_replaced(server, before)


def wait_until_replaced(server: Serve, before: set[psutil.Process]) -> None:
    wait_until(lambda: len(apis(server)) == len(before) and not apis(server) & before)


def work_during(server: Serve, disturb: Callable[[], None]) -> None:
    """Train, sample and stream while it is disturbed; all that comes back is as without."""
    with Client.of(server.url) as client, ThreadPoolExecutor() as threads:
        expected = rounds([client.new_lora()], ROUNDS)
        kept = client.new_lora()
        train(kept, TOKENS)
        weights = kept.save_weights_for_sampler(f"kept-{time.time_ns()}").result().path
        sampler = client.service.create_sampling_client(model_path=weights).result()
        drawn, streamed = draw(sampler), stream(server, weights)
        disturbed = threading.Event()

        def repeat(work: Callable[[], T]) -> list[T]:
            done = [work()]
            while not disturbed.is_set():
                done.append(work())
            return [*done, work()]

        training = threads.submit(repeat, lambda: rounds([client.new_lora()], ROUNDS))
        sampling = threads.submit(repeat, lambda: draw(sampler))
        streaming = threads.submit(repeat, lambda: stream(server, weights))
        try:
            disturb()
        finally:
            disturbed.set()
        assert all(each == expected for each in training.result(300))
        assert all(each == drawn for each in sampling.result(300))
        assert all(each == streamed for each in streaming.result(300))


def draw(sampler: tinker.SamplingClient) -> list[list[int]]:
    futures = [sampler.sample(prompt(random_tokens(8, seed=seed)), 1, PARAMS) for seed in range(SAMPLES)]
    return [list(future.result().sequences[0].tokens) for future in futures]


def stream(server: Serve, model: str) -> str:
    with openai.OpenAI(base_url=f"{server.url}/oai/api/v1", api_key="any", max_retries=2) as oai:
        chunks = oai.completions.create(
            model=model, prompt=TOKENS[:8], max_tokens=100, temperature=0, stream=True
        )
        return "".join(chunk.choices[0].text for chunk in chunks)

"""Several API processes at one port: any of them answers anything, and they end one by one unnoticed."""

import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from tinker import types

from tests.e2e.support.client import Client, prompt, random_tokens
from tests.faults.test_engine_death import client_of, rounds
from tests.support.processes import title
from tests.support.serve import HEAL_S, KINDS, Serve, serving, wait_until

COUNT = 3
PARAMS = types.SamplingParams(max_tokens=40, seed=5, temperature=1.0, stop=[])


@pytest.fixture(autouse=True)
def api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with serving(tmp_path_factory.mktemp("several") / "home", "--api-processes", str(COUNT)) as server:
        yield server


def apis(server: Serve) -> set[psutil.Process]:
    return {each for each in server.tree() if KINDS["API"] in title(each)}


def samples(client: Client, count: int) -> list[list[int]]:
    sampler = client.base_sampler()
    pending = [sampler.sample(prompt(random_tokens(8, seed=seed)), 1, PARAMS) for seed in range(count)]
    return [each.result(HEAL_S).sequences[0].tokens for each in pending]


def test_a_result_comes_at_once_through_another_process_than_its_request(several: Serve) -> None:
    """Each connection is dealt to some process; a ring reaches all of them."""
    with client_of(several) as client:
        model = client.new_lora()
        rounds([model], 1)
        took = []
        for number in range(12):
            began = time.monotonic()
            rounds([model], 1, first=number)
            took.append(time.monotonic() - began)
        assert sorted(took)[6] < 0.9, "they wait for the poll of each second"


def test_every_process_reports_what_all_have_counted(several: Serve) -> None:
    route = r'skyrl_tinker_http_request_seconds_count\{method="GET",route="/healthz",status="2xx"\} (\S+)'

    def counted() -> float:
        found = re.search(route, httpx.get(f"{several.url}/metrics", timeout=30).text)
        return float(found[1]) if found else 0.0

    before = counted()
    for _ in range(30):
        httpx.get(f"{several.url}/healthz", timeout=30)  # each on a connection of its own
    time.sleep(1.1)  # each process keeps its page for a second
    assert [counted() - before for _ in range(12)] == [30.0] * 12


def test_processes_are_replaced_one_by_one_and_no_request_is_lost(several: Serve) -> None:
    with client_of(several) as client, ThreadPoolExecutor() as threads:
        expected, answers = rounds([client.new_lora()], 8), samples(client, 20)
        before = apis(several)
        training = threads.submit(rounds, [client.new_lora()], 8)
        sampling = threads.submit(samples, client, 20)
        downloads = threads.submit(_healthy, several)
        os.kill(several.process.pid, signal.SIGUSR2)
        assert wait_until(lambda: not before & apis(several), HEAL_S)
        assert training.result(HEAL_S) == expected
        assert sampling.result(HEAL_S) == answers
        assert downloads.result(HEAL_S) == 0
        assert len(apis(several)) == COUNT


def _healthy(server: Serve) -> int:
    """Ask again and again, each time on a new connection; return how many were refused."""
    refused = 0
    for _ in range(200):
        try:
            refused += httpx.get(f"{server.url}/healthz", timeout=30).status_code != 200
        except httpx.TransportError:
            refused += 1
        time.sleep(0.02)
    return refused


def test_one_that_is_killed_is_missed_by_nobody(several: Serve) -> None:
    with client_of(several) as client, ThreadPoolExecutor() as threads:
        expected, answers = rounds([client.new_lora()], 6), samples(client, 20)
        training = threads.submit(rounds, [client.new_lora()], 6)
        sampling = threads.submit(samples, client, 20)
        victim = min(apis(several), key=lambda each: each.pid)
        victim.kill()
        assert training.result(HEAL_S) == expected
        assert sampling.result(HEAL_S) == answers
        assert wait_until(lambda: len(apis(several)) == COUNT and victim not in apis(several), HEAL_S)


def test_ps_and_logs_name_each(several: Serve, tmp_path: Path) -> None:
    rows = httpx.get(f"{several.url}/api/v1/console/now", timeout=30).json()["processes"]
    assert [row["name"] for row in rows].count("API") == COUNT
    assert {path.name for path in (several.home / "logs").glob("api*.log")} >= {
        "api.log",
        "api-1.log",
        "api-2.log",
    }

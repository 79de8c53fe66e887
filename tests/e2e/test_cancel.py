"""What clients give up stops in vLLM; what they hand on to other processes goes on."""

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
from tinker import types

from .client import Client, prompt, random_tokens
from .conftest import Server

PROMPT = random_tokens(8, seed=21)
LONG = types.SamplingParams(max_tokens=3000, stop=[], seed=1)
SHORT = types.SamplingParams(max_tokens=4, stop=[], seed=1)
CLONE = """
import pickle, sys
sampler = pickle.loads(bytes.fromhex(sys.stdin.read()))
import tinker
params = tinker.SamplingParams(max_tokens=4, stop=[], seed=1)
print(sampler.sample(tinker.ModelInput.from_ints([5, 6]), 1, params).result().sequences[0].tokens)
print(sampler._request_id_counter // 10**9)
"""


def running(server: Server) -> int:
    """What vLLM says."""
    for process in psutil.Process(server.process.pid).children(recursive=True):
        line = process.cmdline()
        if "--port" in line and any("vllm" in word for word in line):
            text = httpx.get(f"http://127.0.0.1:{line[line.index('--port') + 1]}/metrics").text
            counts = [each for each in text.splitlines() if each.startswith("vllm:num_requests_running{")]
            return int(sum(float(each.rpartition(" ")[2]) for each in counts))
    raise AssertionError("no vLLM server")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_cancelled_sample_stops_in_vllm_and_others_go_on(client: Client, server: Server) -> None:
    sampler = client.base_sampler()
    wait_until(lambda: running(server) == 0)

    pending = [sampler.sample(prompt(PROMPT), 1, LONG) for _ in range(3)]
    wait_until(lambda: running(server) == 3)
    for each in pending[:2]:
        each.future().cancel()
    wait_until(lambda: running(server) <= 1)
    assert not pending[2].future().done()
    pending[2].future().cancel()
    wait_until(lambda: running(server) == 0)
    assert len(sampler.sample(prompt(PROMPT), 1, SHORT).result().sequences[0].tokens) == 4


def test_the_promise_of_a_cancelled_sample_says_so(client: Client, server: Server) -> None:
    session = client.post("create_session", {}).json()["session_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": client.model}
    sampler = client.post("create_sampling_session", body).json()["sampling_session_id"]
    asked = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "prompt": {"chunks": [{"tokens": PROMPT}]},
        "sampling_params": {"max_tokens": 3000, "stop": []},
    }
    promise = {"request_id": client.post("asample", asked).json()["request_id"]}
    wait_until(lambda: running(server) == 1)
    assert client.post("cancel_future", promise).status_code == 200
    failure = client.post("retrieve_future", promise).json()
    assert failure["category"] == "user"
    assert "cancelled" in failure["error"]
    wait_until(lambda: running(server) == 0)


def test_a_pickled_client_joins_its_sampling_session(client: Client) -> None:
    sampler = client.base_sampler()
    own = sampler.sample(prompt([5, 6]), 1, SHORT).result().sequences[0].tokens
    handed = pickle.dumps(sampler).hex()
    for number in (1, 2):
        told = subprocess.run(
            [sys.executable, "-c", CLONE],
            input=handed,
            env={**os.environ},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert told.returncode == 0, told.stderr
        assert told.stdout.splitlines()[-2:] == [str(own), str(number)]

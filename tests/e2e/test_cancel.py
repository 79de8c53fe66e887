"""What clients give up stops in vLLM; what they hand on to other processes goes on."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import httpx
from tinker import types

from tests.e2e.support.client import Client, prompt, random_tokens
from tests.support.processes import client_of, vllm_servers
from tests.support.serve import Serve
from tests.support.waiting import wait_until

PROMPT = random_tokens(8, seed=21)
LONG = types.SamplingParams(max_tokens=4000, stop=[], seed=1)
SHORT = types.SamplingParams(max_tokens=4, stop=[], seed=1)
MANY = 64
STARTED_S, WHOLE_S = 0.5, 6.0
"""CPU time of vLLM after which it is surely sampling, and which all that is asked here takes by far."""
CLONE = """
import os, pickle, sys
sampler = pickle.loads(bytes.fromhex(sys.stdin.read()))
import tinker
params = tinker.SamplingParams(max_tokens=4, stop=[], seed=1)
print(sampler.sample(tinker.ModelInput.from_ints([5, 6]), 1, params).result().sequences[0].tokens)
print(sampler._request_id_counter // 10**9, flush=True)
os._exit(0)
"""
"""A process that ends at once: the SDK's daemon threads may abort it while CPython 3.11 tears itself down."""


class Vllm:
    """The shared server's, asked behind its back. Its CPU time tells what it does on any machine."""

    def __init__(self, server: Serve) -> None:
        self._process, *_ = vllm_servers(server.process.pid)
        self._http = client_of(self._process)

    def cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def wait_until_sampling(self) -> None:
        began = self.cpu_s()
        wait_until(lambda: self.cpu_s() > began + STARTED_S)

    def drain(self) -> None:
        """Until everything that it has is sampled to its end, or aborted."""
        self._http.post("/pause?mode=wait", timeout=None).raise_for_status()
        self._http.post("/resume", timeout=60).raise_for_status()


def test_what_the_sdk_gives_up_stops_in_vllm_and_others_go_on(client: Client, server: Serve) -> None:
    vllm, sampler = Vllm(server), client.base_sampler()
    kept = sampler.sample(prompt(PROMPT), 1, types.SamplingParams(max_tokens=300, stop=[], seed=1))
    given_up = [sampler.sample(prompt(PROMPT), MANY, LONG) for _ in range(2)]
    vllm.wait_until_sampling()
    began = vllm.cpu_s()
    for each in given_up:
        each.future().cancel()
    assert len(kept.result().sequences[0].tokens) == 300
    wait_until(lambda: in_flight(client) == 0)
    vllm.drain()
    assert vllm.cpu_s() - began < WHOLE_S


def in_flight(client: Client) -> float:
    text = httpx.get(f"{client.url}/metrics", timeout=30).text
    (line,) = [each for each in text.splitlines() if each.startswith("skyrl_tinker_samples_in_flight{")]
    return float(line.split()[-1])


def test_the_promise_of_a_cancelled_sample_says_so(client: Client, server: Serve) -> None:
    session = client.post("create_session", {}).json()["session_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": client.model}
    sampler = client.post("create_sampling_session", body).json()["sampling_session_id"]
    asked = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "num_samples": MANY,
        "prompt": {"chunks": [{"tokens": PROMPT}]},
        "sampling_params": {"max_tokens": 4000, "stop": []},
    }
    promise = {"request_id": client.post("asample", asked).json()["request_id"]}
    wait_until(lambda: in_flight(client) == 1)
    assert client.post("cancel_future", promise).status_code == 200
    failure = client.post("retrieve_future", promise).json()
    assert failure["category"] == "user"
    assert "cancelled" in failure["error"]
    wait_until(lambda: in_flight(client) == 0)
    Vllm(server).drain()


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

"""A base model that starts with its first request, beside a busy one, and stops while it is idle."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Event

import httpx
import openai
import psutil
import pytest
import tinker
from tinker import types

from tests.e2e.support.client import Client, datum, prompt, random_tokens
from tests.e2e.support.two_bases import Models, Served, served, write_models
from tests.support.processes import title, vllm_servers
from tests.support.serve import HEAL_S, KINDS, Serve
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long

IDLE_S, GONE_S, COMPARED = 4.0, 10.0, 50
TOKENS = random_tokens(40, seed=4)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def server(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("on-demand") / "home"
    second = f'[bases."{models[1]}"]\nroles = ["train", "sample"]\nstart = "on_demand"\n'
    settings = f"timeouts.base_idle_s = {IDLE_S}\n{second}"
    with served(home, "--base-model", models[0], settings=settings) as found:
        yield found


class Steps:
    """A model in training, and what it lost."""

    def __init__(self, service: tinker.ServiceClient, base_model: str) -> None:
        self.training = Client("", service, base_model).new_lora()
        self.losses: list[float] = []
        self._seed = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.accumulate()
            self.training.optim_step(types.AdamParams(learning_rate=1e-2)).result(HEAL_S)

    def accumulate(self) -> None:
        self._seed += 1
        batch = [datum(random_tokens(50, seed=10 * self._seed + each)) for each in range(3)]
        passed = self.training.forward_backward(batch, "cross_entropy")
        self.losses.append(float(passed.result(HEAL_S).metrics["loss:sum"]))


def state(server: Serve, model: str) -> str:
    answer = httpx.get(f"{server.url}/readyz", timeout=30)
    assert answer.status_code == 200
    told = answer.json()["base_models"]
    return next(str(each["state"]) for each in told if each["base_model"] == model)


def parts(server: Serve) -> list[psutil.Process]:
    """Ranks and samplers."""
    ranks = [each for each in server.tree() if KINDS["trainer"] in title(each)]
    return ranks + vllm_servers(server.process.pid)


def memory(server: Serve) -> int:
    found = 0
    for each in server.tree():
        with suppress(psutil.NoSuchProcess):
            found += each.memory_full_info().pss
    return found


def test_it_runs_while_it_is_used_and_is_as_if_it_had_never_stopped(server: Served, models: Models) -> None:
    """And the other one, which is busy meanwhile, learns what it learns alone."""
    serve, service = server
    engine, kept = serve.find("engine"), parts(serve)
    assert len(kept) == 2
    assert [state(serve, model) for model in models] == ["ready", "stopped"]
    listed = tinker.RestClient(base_url=serve.url).get_server_capabilities().result().supported_models
    assert [(each.model_name, each.trainable, each.sampleable) for each in listed] == [
        (model, True, True) for model in models
    ]
    told = httpx.get(f"{serve.url}/api/v1/console/now", timeout=30).json()
    assert [each["state"] for each in told["server"]["base_models"]] == ["ready", "stopped"]
    assert told["problems"] == []

    over, busy, before = Event(), Steps(service, models[0]), memory(serve)
    with ThreadPoolExecutor(1) as pool:
        training: Future[None] = pool.submit(_train_until, over, busy)
        try:
            whole, halves = (Steps(service, models[1]) for _ in range(2))
            for each in (whole, halves):
                each.train(3)
                each.accumulate()
            whole.train(3)
            sampler = halves.training.save_weights_and_get_sampling_client().result(HEAL_S)
            scored = sampler.compute_logprobs(prompt(TOKENS)).result(HEAL_S)
            used = memory(serve)
            assert len(parts(serve)) == 4
            _await_stop(serve, models[1], kept)
            assert used - memory(serve) >= 0.9 * (used - before)
            halves.train(3)
            found = sampler.compute_logprobs(prompt(TOKENS)).result(HEAL_S)
            assert found[1:] == pytest.approx(scored[1:], abs=1e-3)
        finally:
            over.set()
        training.result(HEAL_S)
    assert halves.losses == whole.losses
    assert (serve.find("engine"), set(kept) <= set(parts(serve))) == (engine, True)
    alone = Steps(service, models[0])
    alone.train(min(COMPARED, len(busy.losses)))
    assert alone.losses == busy.losses[:COMPARED]


def _train_until(over: Event, model: Steps) -> None:
    while not over.is_set():
        model.train(1)


def _await_stop(server: Serve, model: str, kept: Sequence[psutil.Process]) -> None:
    """Wait until it has no processes left, which takes them no longer than GONE_S."""
    running = len(parts(server))
    wait_until(lambda: len(parts(server)) < running, HEAL_S)
    began = time.monotonic()
    wait_until(lambda: set(parts(server)) == {*kept}, HEAL_S)
    assert time.monotonic() - began <= GONE_S
    wait_until(lambda: state(server, model) == "stopped", HEAL_S)


def test_samples_and_chats_start_it_too(server: Served, models: Models) -> None:
    serve, service = server
    sampler = service.create_sampling_client(base_model=models[1]).result()
    wait_until(lambda: state(serve, models[1]) == "stopped", HEAL_S)
    scored = sampler.compute_logprobs(prompt(TOKENS)).result(HEAL_S)
    wait_until(lambda: state(serve, models[1]) == "stopped", HEAL_S)
    with openai.OpenAI(base_url=f"{serve.url}/oai/api/v1", api_key="any", max_retries=0) as client:
        answer = client.completions.create(model=models[1], prompt="2+2", max_tokens=3)
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0
    assert sampler.compute_logprobs(prompt(TOKENS)).result(HEAL_S)[1:] == pytest.approx(scored[1:], abs=1e-3)


def test_a_wait_says_that_it_is_being_started(server: Served, models: Models) -> None:
    serve, service = server
    wait_until(lambda: state(serve, models[1]) == "stopped", HEAL_S)
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(lambda: Client("", service, models[1]).new_lora())
        told: set[str] = set()
        while not made.done():
            now = httpx.get(f"{serve.url}/api/v1/console/now", timeout=30).json()
            told |= {each["reason"] for each in now["queue"] if each["kind"] == "training"}
        made.result(HEAL_S)
    assert f"base model {models[1]} is being started" in told


def _says(server: Serve, *command: str) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-m", "skyrl_tinker", "bases", *command, "--url", server.url]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)


def test_its_owner_starts_and_stops_it_and_cuts_nothing(server: Served, models: Models) -> None:
    serve, service = server
    first, second = models
    wait_until(lambda: state(serve, second) == "stopped", HEAL_S)
    assert _says(serve, "start", second).stdout == f"base model {second} is being started\n"
    wait_until(lambda: state(serve, second) == "ready", HEAL_S)
    model = Steps(service, second)
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(model.train, 8)
        wait_until(lambda: model.losses or training.done())
        stopping = _says(serve, "stop", second)
        training.result(HEAL_S)
    assert stopping.stdout == f"base model {second} stops once no request waits or runs\n"
    wait_until(lambda: state(serve, second) == "stopped", HEAL_S)
    assert f"{second}: stopped, as was asked" in (serve.home / "logs" / "engine.log").read_text()
    listed = json.loads(_says(serve, "--json").stdout)
    assert [(each["base_model"], each["start"], each["state"]) for each in listed] == [
        (first, "always", "ready"),
        (second, "on_demand", "stopped"),
    ]
    assert second in _says(serve).stdout
    refused = _says(serve, "stop", first)
    assert (refused.returncode, "which always runs as the first one" in refused.stderr) == (1, True)

"""One death of every kind of process of one server, in this order, while clients train and sample.

The same models and samplers live through all of them, and answer to the bit as their twins did that nobody
disturbed: nothing is lost and nothing runs twice. Other modules here stop processes, kill them repeatedly or
two at once. Deaths of Ray's daemons and of `serve` come last, in scripts/proofs healing.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import tinker
from tinker import types

from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from tests.e2e.support.client import Client, logprobs_of, prompt, random_tokens
from tests.e2e.support.policies import ATOL, TOKENS, policy, roll, scores, step
from tests.faults.test_api_processes import apis, replace, work_during
from tests.faults.test_engine_death import read_round, rounds, submit_round
from tests.support.kills import assert_healed, find
from tests.support.processes import free_port, is_zombie, vllm_servers
from tests.support.serve import CORE, HEAL_S, Serve
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(900)
ROUNDS = 10
SAMPLES = 16
ROLLED = 100
PARAMS = types.SamplingParams(max_tokens=60, seed=5, temperature=1.0, stop=[])


class Clients:
    """Two adapters and a full copy, which train in rounds, and a sampler of the first after one round."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.quiet = rounds(self._new_models(), ROUNDS)
        self.models = self._new_models()
        self.numbers = count()
        (first,) = rounds(self.models, 1, next(self.numbers))
        assert first == self.quiet[0]
        self.sampler = self.models[0].save_weights_and_get_sampling_client().result()
        self._tokens = self._read(self._ask())
        self.inflight = {rank: policy(client, rank=rank, steps=1) for rank in (8, 0)}
        self.followers = {rank: publish(training) for rank, training in self.inflight.items()}

    def _new_models(self) -> list[tinker.TrainingClient]:
        return [self.client.new_lora(), self.client.new_lora(rank=4), self.client.new_full()]

    def train(self) -> Callable[[], None]:
        """Send the next round; the result compares its answers."""
        number = next(self.numbers)
        sent = [submit_round(model, number) for model in self.models]

        def check() -> None:
            assert [read_round(*each) for each in sent] == self.quiet[number]

        return check

    def sample(self) -> Callable[[], None]:
        """Ask for samples; the result compares them."""
        asked = self._ask()

        def check() -> None:
            assert self._read(asked) == self._tokens

        return check

    def _ask(self) -> list[Any]:
        prompts = [prompt(random_tokens(8, seed=seed)) for seed in range(SAMPLES)]
        return [self.sampler.sample(each, 1, PARAMS) for each in prompts]

    def _read(self, asked: list[Any]) -> list[list[int]]:
        return [list(each.result(HEAL_S).sequences[0].tokens) for each in asked]


def publish(training: tinker.TrainingClient) -> tinker.SamplingClient:
    return training.save_weights_and_get_sampling_client(kind="inflight").result(HEAL_S)


@pytest.fixture(scope="module")
def servers() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def server(servers: ExitStack, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    port = free_port()
    started = Serve(tmp_path_factory.mktemp("deaths") / "home", "--port", str(port))
    servers.callback(started.close)
    return started.wait_ready()


@pytest.fixture(scope="module")
def clients(server: Serve) -> Iterator[Clients]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", "tml-local")
        service = tinker.ServiceClient(base_url=server.url)
        yield Clients(Client(server.url, service))
        service.close("success")


@contextmanager
def held(*processes: psutil.Process) -> Iterator[None]:
    """Stopped, so that work stays in flight; `serve` kills what stands still, but not within four seconds."""
    for each in processes:
        each.suspend()
    try:
        yield
    finally:
        for each in processes:
            with suppress(psutil.NoSuchProcess):
                each.resume()


def kill(process: psutil.Process) -> None:
    """Unless `serve` was faster, as one of those that stand still."""
    with suppress(psutil.NoSuchProcess):
        process.kill()


def is_gone(process: psutil.Process) -> bool:
    return is_zombie(process) or not process.is_running()


def await_in_flight(
    server: Serve, *, training: int = 0, samples: int = 0, until: Callable[[], bool] = lambda: False
) -> bool:
    """Wait until so many requests are accepted, a unit of the trainer runs, and all samples are with vLLM.

    Returns whether it became so, before `until` did.
    """

    def there() -> bool:
        now = httpx.get(f"{server.url}/api/v1/console/now", timeout=HEAL_S, verify=False).json()
        accepted = Counter[str]()
        for each in now["queue"]:
            accepted[each["kind"]] += each["waiting"]
        if (accepted["training"], accepted["sampling"]) != (training, samples) or not now["trainers"]:
            return False
        begun = now["trainers"][0]["running"] is not None
        return begun == (training > 0) and sum(each["in_flight"] for each in now["samplers"]) == samples

    arrived = False

    def over() -> bool:
        nonlocal arrived
        arrived = there()
        return arrived or until()

    wait_until(over)
    return arrived


def test_the_api_is_killed_with_long_polls_of_passes_and_samples(server: Serve, clients: Clients) -> None:
    engine, api = find(server, "engine"), find(server, "API")
    with held(find(server, "trainer"), find(server, CORE)):
        trained, sampled = clients.train(), clients.sample()
        await_in_flight(server, training=6, samples=SAMPLES)
        api.kill()
    trained()
    sampled()
    assert_healed(server, "API", api)
    assert find(server, "engine") == engine


def test_the_api_is_replaced_while_clients_train_sample_and_stream(server: Serve) -> None:
    (before,) = apis(server)
    log = server.home / "logs" / "api.log"
    said = len(log.read_text())
    work_during(server, lambda: replace(server))
    (now,) = apis(server)
    assert now != before
    assert "Traceback" not in log.read_text()[said:]


def test_a_rank_is_killed_in_a_pass(server: Serve, clients: Clients) -> None:
    engine, in_flight = find(server, "engine"), False
    while not in_flight:  # `serve` was faster where the rank was held in a snapshot of models of before
        rank = find(server, "trainer")
        with held(rank):
            trained = clients.train()
            in_flight = await_in_flight(server, training=6, until=partial(is_gone, rank))
            kill(rank)
        trained()
    assert_healed(server, "trainer", rank)
    assert find(server, "engine") == engine
    clients.sample()()


def test_the_core_of_vllm_is_killed_with_samples_and_an_inflight_update(
    server: Serve, clients: Clients
) -> None:
    """What waited for it is sampled with the update alone, whose logprobs are the trainer's."""
    engine, core = find(server, "engine"), find(server, CORE)
    with held(core):
        rolled = {rank: roll(sampler, ROLLED) for rank, sampler in clients.followers.items()}
        sampled = clients.sample()
        await_in_flight(server, samples=SAMPLES + 2)
        kill(core)
    for training in clients.inflight.values():
        step(training)
        publish(training)
    for rank, training in clients.inflight.items():
        (sequence,) = rolled[rank].result(HEAL_S).sequences
        np.testing.assert_allclose(sequence.logprobs, scores(training, sequence.tokens), atol=ATOL)
        assert len(sequence.tokens) == ROLLED
    sampled()
    assert_healed(server, CORE, core)
    assert find(server, "engine") == engine


def test_the_engine_is_killed_with_passes_samples_a_save_and_a_creation(
    server: Serve, clients: Clients
) -> None:
    engine = find(server, "engine")
    with held(find(server, "trainer"), find(server, CORE)):
        trained, sampled = clients.train(), clients.sample()
        saving = clients.models[0].save_state("in-flight")
        creating = clients.client.service.create_lora_training_client(
            base_model=clients.client.model, seed=1, rank=8
        )
        await_in_flight(server, training=8, samples=SAMPLES)
        engine.kill()
    trained()
    sampled()
    assert rounds([creating.result(HEAL_S)], 1)[0] == clients.quiet[0][:1]
    following = next(clients.numbers)
    assert rounds(clients.models, 1, following)[0] == clients.quiet[following]
    service, path = clients.client.service, saving.result(HEAL_S).path
    copy = service.create_training_client_from_state_with_optimizer(path).result(HEAL_S)
    assert rounds([copy], 1, following)[0] == clients.quiet[following][:1]
    for rank, training in clients.inflight.items():
        scored = clients.followers[rank].compute_logprobs(prompt(TOKENS)).result(HEAL_S)
        np.testing.assert_allclose(scored[1:], logprobs_of(training, TOKENS), atol=ATOL)
    assert_healed(server, "engine", engine)
    temporary = Directories(Settings(home=server.home)).bell_dir
    assert len(list(temporary.rglob("vllm-*"))) == 1


@pytest.mark.long
@pytest.mark.parametrize("daemon", ["raylet", "GCS"])
def test_a_daemon_of_ray_is_killed_with_passes_and_samples(
    server: Serve, clients: Clients, daemon: str
) -> None:
    """The engine ends at once: without the daemon a call of Ray's waits for a minute."""
    victim = find(server, daemon)
    with held(find(server, "trainer"), find(server, CORE)):
        trained, sampled = clients.train(), clients.sample()
        await_in_flight(server, training=6, samples=SAMPLES)
        victim.kill()
    trained()
    sampled()
    assert_healed(server, daemon, victim)
    log = (server.home / "logs" / "engine.log").read_text()
    assert f"ended: a process of Ray died (pid {victim.pid})" in log


@pytest.fixture(scope="module")
def second(server: Serve, clients: Clients, servers: ExitStack) -> Serve:
    """With two replicas, on the home of the first, which was killed with a hung engine and work in flight."""
    engine, port = find(server, "engine"), server.url.rpartition(":")[2]
    with held(find(server, "trainer"), find(server, CORE)):
        trained, sampled = clients.train(), clients.sample()
        await_in_flight(server, training=6, samples=SAMPLES)
        with held(engine):  # it does not hear that its parent died
            server.tree()
            server.process.kill()
            server.process.wait()
            assert engine.is_running()
            started = Serve(server.home, "--port", port, "--replicas", "2")
            servers.callback(started.close)
            started.wait_ready()
    assert server.left() == []
    trained()
    sampled()
    return started


@pytest.mark.long
def test_a_second_serve_ends_what_a_killed_one_left_and_goes_on(second: Serve, clients: Clients) -> None:
    clients.train()()
    for rank, training in clients.inflight.items():
        scored = clients.followers[rank].compute_logprobs(prompt(TOKENS)).result(HEAL_S)
        np.testing.assert_allclose(scored[1:], logprobs_of(training, TOKENS), atol=ATOL)


@pytest.mark.long
def test_the_router_and_then_a_server_of_vllm_is_killed_with_samples(second: Serve, clients: Clients) -> None:
    servers, router = vllm_servers(second.process.pid), find(second, "router")
    with held(*servers):
        sampled = clients.sample()
        await_in_flight(second, samples=SAMPLES)
        router.kill()
    sampled()
    assert_healed(second, "router", router)
    with held(*servers):
        sampled = clients.sample()
        await_in_flight(second, samples=SAMPLES)
        kill(servers[0])
    sampled()


@pytest.mark.long
def test_sigterm_ends_all_of_it_quietly(second: Serve, clients: Clients) -> None:
    clients.client.service.close("success").result(HEAL_S)
    second.stop()
    output, said = second.process.communicate()
    assert not output.strip()  # the announcement has been read, perhaps without its last line break
    first, *phases = said.splitlines()
    assert re.fullmatch(r"skyrl-tinker: ended \d+ processes left by a killed server", first)
    begin = "skyrl-tinker: (starting|waiting for|replaying)"
    assert not [line for line in phases if not re.match(begin, line)]

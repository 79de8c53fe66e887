"""A home under another path, and a backup taken while clients trained, have what was acknowledged."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tinker
from tinker import types

from tests.e2e.support.client import Client, datum, prompt, random_tokens
from tests.support.processes import free_port
from tests.support.serve import HEAL_S, Serve, serving
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long

TOKENS = random_tokens(30, seed=1)
STEP = types.AdamParams(learning_rate=1e-2)


def losses(training: tinker.TrainingClient, count: int, first: int = 0) -> list[float]:
    """Train on `count` batches from number `first` on; the loss of each."""
    found = []
    for number in range(first, first + count):
        backward = training.forward_backward([datum(random_tokens(40, seed=number))], "cross_entropy")
        training.optim_step(STEP)
        found.append(backward.result(HEAL_S).metrics["loss:sum"])
    return found


def scores(sampler: tinker.SamplingClient) -> list[float]:
    return sampler.compute_logprobs(prompt(TOKENS)).result(HEAL_S)


def test_a_moved_home_is_complete(tmp_path: Path) -> None:
    port = str(free_port())
    before, after = tmp_path / "before", tmp_path / "elsewhere" / "after"
    with serving(before, "--port", port) as first:
        service = tinker.ServiceClient(base_url=first.url)
        client = Client(first.url, service)
        expected = losses(client.new_lora(), 3)
        training = client.new_lora()
        assert losses(training, 2) == expected[:2]
        state = training.save_state("kept").result().path
        named = training.save_weights_for_sampler("named").result().path
        scored = scores(service.create_sampling_client(model_path=named).result())
    after.parent.mkdir()
    before.rename(after)
    with serving(after, "--port", port), service:
        assert losses(training, 1, first=2) == expected[2:]
        resumed = service.create_training_client_from_state_with_optimizer(state).result()
        assert losses(resumed, 1, first=2) == expected[2:]
        assert scores(service.create_sampling_client(model_path=named).result()) == pytest.approx(
            scored, abs=1e-5
        )
        again = resumed.save_weights_and_get_sampling_client().result()
        assert len(scores(again)) == len(TOKENS)
    assert not before.exists()


def test_a_backup_taken_meanwhile_has_what_was_acknowledged(server: Serve, tmp_path: Path) -> None:
    wait_until(server.ready, HEAL_S)
    with tinker.ServiceClient(base_url=server.url) as service:
        client = Client(server.url, service)
        expected = losses(client.new_lora(), 3)
        training = client.new_lora()
        assert losses(training, 2) == expected[:2]
        state = training.save_state("kept").result().path
        in_flight = [client.new_lora().forward([datum(TOKENS)], "cross_entropy") for _ in range(4)]
        file = tmp_path / "copy" / "skyrl-tinker.db"
        file.parent.mkdir()
        command = [sys.executable, "-m", "skyrl_tinker", "db", "backup", str(file)]
        subprocess.run([*command, "--home", str(server.home)], check=True)
        shutil.copytree(server.home / "checkpoints", file.parent / "checkpoints")
        for future in in_flight:
            future.result(HEAL_S)
    with serving(file.parent) as restored, tinker.ServiceClient(base_url=restored.url) as service:
        resumed = service.create_training_client_from_state_with_optimizer(state).result()
        assert losses(resumed, 1, first=2) == expected[2:]

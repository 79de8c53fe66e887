"""Another server beside the first: untied embeddings, two ranks, a model directory with its own name."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker

from tests.e2e.conftest import Server
from tests.e2e.support.client import Client, logprobs_of, prompt, random_tokens, train
from tests.e2e.test_exactness import TOKENS, hugging_face_logprobs, sampled_and_trained_logprobs


@pytest.fixture(scope="module")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "untied"
    command = [
        sys.executable,
        "-m",
        "skyrl_tinker",
        "make-model",
        str(directory),
        "--hidden",
        "64",
        "--untied",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return directory


@pytest.fixture(scope="module")
def second(client: Client, untied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """`client` is asked for so that both servers run at the same time."""
    arguments = ("--base-model", str(untied_model), "--model-name", "mine", "--trainer-ranks", "2")
    server = Server(tmp_path_factory.mktemp("second"), *arguments)
    with tinker.ServiceClient(base_url=server.url) as service:
        yield Client(server.url, service, "mine")
    assert server.stop() == 0


def test_two_ranks_agree_with_a_plain_hugging_face_forward(second: Client, untied_model: Path) -> None:
    scored = logprobs_of(second.new_lora(), TOKENS)
    np.testing.assert_allclose(scored, hugging_face_logprobs(str(untied_model), TOKENS), atol=1e-4)


@pytest.mark.parametrize("rank", [16, 0])
def test_sampler_agrees_with_two_ranks_after_sync_of_an_untied_model(second: Client, rank: int) -> None:
    training = second.new_lora(rank=rank)
    before = logprobs_of(training, TOKENS)
    for _ in range(3):
        train(training, TOKENS, 1e-2 if rank else 1e-3)
    assert np.abs(logprobs_of(training, TOKENS) - before).max() > 0.05
    sampler = training.save_weights_and_get_sampling_client().result()
    sampled, scored = sampled_and_trained_logprobs(training, sampler)
    np.testing.assert_allclose(sampled, scored, atol=1e-3)


def test_a_checkpoint_of_two_ranks_resumes(second: Client) -> None:
    training = second.new_lora()
    train(training, TOKENS)
    path = training.save_state("both").result().path
    resumed = second.service.create_training_client_from_state_with_optimizer(path).result()
    train(training, TOKENS)
    train(resumed, TOKENS)
    np.testing.assert_allclose(logprobs_of(resumed, TOKENS), logprobs_of(training, TOKENS), atol=1e-6)


def test_the_model_answers_to_its_name_and_its_directory(second: Client, untied_model: Path) -> None:
    for name in ("mine", str(untied_model)):
        sampler = second.service.create_sampling_client(base_model=name).result()
        assert sampler.compute_logprobs(prompt(random_tokens(5, seed=1))).result()[0] is None


def test_the_first_server_goes_on_beside_it(client: Client, second: Client) -> None:
    train(client.new_lora(), TOKENS)
    train(second.new_lora(), TOKENS)

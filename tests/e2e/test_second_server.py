"""Another server beside the first: untied embeddings, two ranks, a model directory with its own name."""

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker

from tests.e2e.support.client import Client, gap_of_next_step, logprobs_of, prompt, random_tokens, train
from tests.e2e.test_exactness import TOKENS, hugging_face_logprobs, sampled_and_trained_logprobs
from tests.e2e.test_order import Model
from tests.support.serve import Serve, serving

pytestmark = pytest.mark.long

SETTINGS = """
parity = {gap_bound = 1e-12, canary = false}
timeouts = {long_poll_s = 2}
ephemeral = {keep = 1, idle_s = 1}
"""


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
def running(client: Client, untied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """`client` is asked for so that both servers run at the same time."""
    home = tmp_path_factory.mktemp("second") / "home"
    options = ["--base-model", str(untied_model), "--model-name", "mine", "--trainer-ranks", "2"]
    with serving(home, *options, settings=SETTINGS) as server:
        yield server


@pytest.fixture(scope="module")
def second(running: Serve) -> Iterator[Client]:
    with Client.of(running.url, "mine") as client:
        yield client


def test_a_gap_beyond_the_bound_is_a_warning_that_users_see(
    second: Client, running: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """No float is as near as 1e-12 to another one that was computed in another way."""
    training = second.new_lora()
    train(training, TOKENS)
    training.save_weights_for_sampler("apart").result()
    gap = gap_of_next_step(training, TOKENS)
    assert not math.isnan(gap)
    assert "differ from the trainer's" not in caplog.text
    with Client.of(running.url, "mine") as client:
        client.base_sampler()  # needs a session
    assert "differ from the trainer's" in caplog.text, "create_session said nothing"
    log = (running.home / "logs" / "engine.log").read_text()
    assert f"differ from the trainer's by {gap:.1e}" in log
    assert " WARNING " in log
    assert running.process.stderr is not None
    warning = next(line for line in running.process.stderr if line.startswith("skyrl-tinker: warning: "))
    assert "parity.gap_bound" in warning


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


def test_a_long_poll_is_held_and_then_says_why_it_waits(second: Client) -> None:
    """seq 2 waits for seq 1, which never comes; the hold itself is tested at length in tests/api."""
    model = Model(second)
    request_id = model.forward_backward(2)
    with httpx.Client(timeout=60) as http:
        answer = http.post(
            f"{second.url}/api/v1/retrieve_future",
            content=json.dumps({"request_id": request_id}),
            headers={"X-API-Key": "tml-local"},
        )
    assert answer.status_code == 408
    assert answer.json()["type"] == "try_again"
    assert answer.elapsed.total_seconds() > 1.9


def test_older_unnamed_weights_expire_and_say_so(second: Client) -> None:
    """This server keeps one save for sampling of each model, older ones for a second."""
    training = second.new_lora()
    older, newer = (training.save_weights_and_get_sampling_client().result() for _ in range(2))
    time.sleep(8)  # a second that it is kept, and the sweeps that come every three
    with pytest.raises(tinker.RequestFailedError, match=r"have expired .* save them again"):
        older.compute_logprobs(prompt(TOKENS)).result()
    assert newer.compute_logprobs(prompt(TOKENS)).result()[1:]

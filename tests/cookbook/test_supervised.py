"""sl_loop (flat) and chat_sl (pipelined: two steps in flight)."""

import numpy as np
import pytest
import tinker

from tests.cookbook.support import data
from tests.cookbook.support.kitchen import RENDERER, Kitchen, Row, Run
from tests.e2e.support.client import logprobs_of, prompt, random_tokens

pytestmark = pytest.mark.long


def test_sl_loop_learns(taught: Run) -> None:
    assert taught.column("step") == list(range(40))
    losses = taught.column("train_mean_nll")
    assert losses[0] > 5
    assert np.mean(losses[-5:]) < 0.5  # the answers themselves cannot be foretold


def test_its_checkpoints_load(taught: Run, service: tinker.ServiceClient) -> None:
    """Weights for training and for sampling are the same ones, and no others."""
    first, *_, final = taught.checkpoints
    names = [each["name"] for each in taught.checkpoints]
    assert names == [*(f"{step:06d}" for step in range(5, 40, 5)), "final"]
    tokens = random_tokens(50, seed=1)
    trained = scores(service, final, tokens)
    sampler = service.create_sampling_client(model_path=final["sampler_path"]).result()
    sampled = sampler.compute_logprobs(prompt(tokens)).result()
    np.testing.assert_allclose(sampled[1:], trained, atol=1e-4)
    assert np.abs(scores(service, first, tokens) - trained).max() > 0.1


def scores(service: tinker.ServiceClient, checkpoint: Row, tokens: list[int]) -> np.ndarray:
    training = service.create_training_client_from_state_with_optimizer(checkpoint["state_path"]).result()
    return logprobs_of(training, tokens)


def test_sl_loop_resumes_exactly(kitchen: Kitchen, taught: Run) -> None:
    """Started again where a run was killed after a checkpoint, it does what the whole run did."""
    kitchen.log("resumed", taught.checkpoints[3])
    settings = ("batch_size=8", "learning_rate=6e-3", "max_length=512", "save_every=0")
    resumed = kitchen.cook("sl_loop", "resumed", *settings)
    assert resumed.column("step") == list(range(20, 40))
    whole = taught.column("train_mean_nll")[20:]
    np.testing.assert_allclose(resumed.column("train_mean_nll"), whole, rtol=1e-4)


def test_chat_sl_learns_from_a_file(kitchen: Kitchen, service: tinker.ServiceClient) -> None:
    lessons = data.write_jsonl(kitchen.directory / "lessons.jsonl", data.lessons(160))
    settings = (f"dataset={lessons}", f"renderer_name={RENDERER}", "batch_size=16", "max_length=512")
    cadence = ("learning_rate=5e-3", "save_every=5", "eval_every=0")
    run = kitchen.cook("chat_sl.train", "chat_sl", *settings, *cadence)
    assert run.column("step") == list(range(10))
    losses = run.column("train_mean_nll")
    assert losses[-1] < losses[0] - 3
    assert [each["name"] for each in run.checkpoints] == ["000005", "final"]
    for checkpoint in run.checkpoints:
        sampler = service.create_sampling_client(model_path=checkpoint["sampler_path"]).result()
        assert sampler.compute_logprobs(prompt([5, 6])).result()[0] is None

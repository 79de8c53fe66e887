"""Dimuon by the SDK: chosen when a model is made, fixed for its life, kept by its checkpoints."""

import numpy as np
import pytest
import tinker
from tinker import types

from tests.e2e.support.client import Client, datum, logprobs_of, random_tokens

TOKENS = random_tokens(40, seed=8)
DIMUON = types.DimuonOptimizerConfig()
STEP = types.DimuonParams(learning_rate=0.02, grad_clip_norm=1.0)


def _train(training: tinker.TrainingClient, params: types.AdamParams | types.DimuonParams = STEP) -> None:
    backward = training.forward_backward([datum(TOKENS)], "cross_entropy")
    step = training.optim_step(params)
    backward.result()
    step.result()


@pytest.mark.parametrize("rank", [8, 0])
def test_dimuon_learns_and_goes_on_from_a_checkpoint_as_if_never_stopped(client: Client, rank: int) -> None:
    training = client.new_lora(rank=rank, optimizer=DIMUON)
    assert training.get_info().optimizer_config.model_dump() == DIMUON.model_dump()
    before = logprobs_of(training, TOKENS).sum()
    for _ in range(5):
        _train(training)
    assert logprobs_of(training, TOKENS).sum() > before + 1.0
    path = training.save_state("dimuon").result().path
    resumed = client.service.create_training_client_from_state_with_optimizer(path).result()
    assert resumed.get_info().optimizer_config.model_dump() == DIMUON.model_dump()
    for each in (training, resumed):
        _train(each)
    np.testing.assert_array_equal(logprobs_of(resumed, TOKENS), logprobs_of(training, TOKENS))


def test_weights_alone_may_go_on_with_another_optimizer(client: Client) -> None:
    training = client.new_lora(optimizer=DIMUON)
    _train(training)
    path = training.save_state("weights").result().path
    other = client.service.create_training_client_from_state(path).result()
    _train(other, types.AdamParams(learning_rate=1e-2))
    same = client.service.create_training_client_from_state(path, optimizer=DIMUON).result()
    _train(same)


def test_a_step_of_another_optimizer_fails_and_the_next_window_is_clean(client: Client) -> None:
    one, other = (client.new_lora(optimizer=DIMUON) for _ in range(2))
    with pytest.raises(tinker.RequestFailedError, match="parameters of adamw, expected those of dimuon"):
        _train(one, types.AdamParams(learning_rate=1e-2))
    for each in (one, other):
        _train(each)
    np.testing.assert_array_equal(logprobs_of(one, TOKENS), logprobs_of(other, TOKENS))

"""The same mixed work on 1, 2 and 4 ranks gives the same numbers: real actors, real process groups."""

import asyncio

import numpy as np
import pytest

from skyrl_tinker.domain.ids import ModelKey, RequestId
from skyrl_tinker.domain.values import AdamParams, LoraSpec, PassItem, PassOutput, StepItem
from skyrl_tinker.training.trainer_group import TrainerGroup, TrainerSpec
from tests.training.support.passes import make_data, make_item
from tests.training.support.saves import published_weights

pytestmark = pytest.mark.long

SPECS = {
    ModelKey(1): LoraSpec(8, 1),
    ModelKey(2): LoraSpec(4, 2, train_mlp=False, train_attn=False),
    ModelKey(3): LoraSpec(16, 3, train_unembed=False),
    ModelKey(4): LoraSpec(0, 0),
}
ADAM = AdamParams(1e-2, weight_decay=0.1, grad_clip_norm=0.5, eps=1e-3)
WORLDS = (1, 2, 4)
COVARIANCE = {"clip_cov_ratio": 0.1}
Trained = tuple[list[PassOutput], list[dict[str, float]], dict[ModelKey, dict[str, np.ndarray]]]


def _units(turn: int) -> list[tuple[PassItem, ...]]:
    """All kinds of loss: per target, candidate, datum and request; also fewer datums than ranks."""
    return [
        (
            make_item(2, make_data((40, 30, 9), turn, "clip_cov"), "clip_cov", config=COVARIANCE),
            make_item(1, make_data((50, 9, 60, 33), turn, candidates=3)),
            make_item(4, make_data((20, 50), turn, "gspo"), "gspo"),
            make_item(3, make_data((1,), turn, "stable_reinforce"), "stable_reinforce"),
            make_item(1, make_data((12, 12), turn, "kl_cov"), "kl_cov", backward=False, seq_id=1),
        ),
        (make_item(3, make_data((64, 3), turn + 10, "ppo"), "ppo"),),
        (make_item(4, make_data((1,), turn + 20)),),
    ]


async def _train(group: TrainerGroup) -> Trained:
    for model, spec in SPECS.items():
        await group.create_model(model, spec)
    outputs: list[PassOutput] = []
    metrics: list[dict[str, float]] = []
    for turn in range(2):
        for items in _units(turn):
            found = (await group.run_pass(group.prepare(items))).outputs
            assert all(isinstance(output, PassOutput) for output in found), found
            outputs += [output for output in found if isinstance(output, PassOutput)]
        steps = await group.optim_step([StepItem(RequestId("s"), model, ADAM) for model in SPECS])
        metrics += [dict(output.metrics) for output in steps]
    await group.run_pass(group.prepare(_units(0)[0]))  # the ranks' shares differ, their answer must not
    steps = [StepItem(RequestId("s"), model, AdamParams(3e38)) for model in SPECS]
    for refused in await group.optim_step(steps):
        assert "would push weight beyond float32" in str(refused.error)
    adapters = {model: await published_weights(group, model) for model, spec in SPECS.items() if spec.rank}
    return outputs, metrics, adapters


async def _run(directory: str, ranks: int) -> Trained:
    group = TrainerGroup.launch(TrainerSpec(directory, ranks, "cpu", "float32", 1, 64, timeout_s=120.0))
    try:
        await group.ready()
        return await _train(group)
    finally:
        await group.shutdown()


@pytest.fixture(scope="module")
def trained(ray_cluster: None, tied_model: str) -> dict[int, Trained]:
    return {ranks: asyncio.run(_run(tied_model, ranks)) for ranks in WORLDS}


@pytest.mark.parametrize("ranks", WORLDS[1:])
def test_ranks_equal_one_rank(trained: dict[int, Trained], ranks: int) -> None:
    (outputs, metrics, adapters), (others, other_metrics, other_adapters) = trained[1], trained[ranks]
    for output, other in zip(outputs, others, strict=True):
        assert output.metrics == pytest.approx(other.metrics, rel=1e-5, abs=1e-3)
        for found, expected in zip(output.logprobs, other.logprobs, strict=True):
            assert found.shape == expected.shape
            np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
    for step, other_step in zip(metrics, other_metrics, strict=True):
        assert step == pytest.approx(other_step, rel=1e-5)
    for model, adapter in adapters.items():
        for name, array in adapter.items():
            np.testing.assert_allclose(other_adapters[model][name], array, atol=1e-5, rtol=0, err_msg=name)

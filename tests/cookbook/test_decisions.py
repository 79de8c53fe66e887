"""Decisions: one question, a fixed set of answers, and the probability of each."""

import asyncio
from collections.abc import Sequence

import pytest
import tinker
from tinker import types
from tinker_cookbook.recipes import decisions
from tinker_cookbook.renderers import Renderer

from tests.cookbook.support.kitchen import MODEL

pytestmark = pytest.mark.long

TEAMS = {"billing": "Charges and invoices", "sdk": "The Python package", "console": "Signing in"}
DESK = [("A wrong invoice.", "billing"), ("An import that fails.", "sdk"), ("A lost password.", "console")]


@pytest.fixture
def decision_renderer(renderer: Renderer) -> decisions.DecisionRenderer:
    return decisions.DecisionRenderer(renderer)


@pytest.fixture
def training(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result()


def decision(text: str) -> decisions.Decision:
    return decisions.Decision(text, list(TEAMS.items()))


def decided(
    training: tinker.TrainingClient, renderer: decisions.DecisionRenderer, texts: Sequence[str]
) -> list[dict[str, float]]:
    """The probability of each team, for each text, by the weights of now."""
    sampler = training.save_weights_and_get_sampling_client().result()

    async def sample() -> list[dict[str, float]]:
        asked = (decisions.sample_decision(sampler, renderer.render(decision(text))) for text in texts)
        return await asyncio.gather(*asked)

    return asyncio.run(sample())


def step(training: tinker.TrainingClient, learning_rate: float) -> None:
    training.optim_step(types.AdamParams(learning_rate=learning_rate)).result()


def test_the_right_label_becomes_the_likely_one(
    training: tinker.TrainingClient, decision_renderer: decisions.DecisionRenderer
) -> None:
    """Of three questions that differ in a few words, by the cross-entropy of single tokens."""
    texts, teams = zip(*DESK, strict=True)
    examples = [(decision(text), team) for text, team in DESK]
    data = decisions.decision_choice_datums(decision_renderer, examples)
    before = decided(training, decision_renderer, texts)
    for _ in range(40):
        backward = training.forward_backward(data, "cross_entropy")
        step(training, 1e-3)
        assert backward.result().metrics["weights:sum"] == len(DESK)
    after = decided(training, decision_renderer, texts)
    assert max(old[team] for old, team in zip(before, teams, strict=True)) < 0.6
    assert min(new[team] for new, team in zip(after, teams, strict=True)) > 0.8


def test_a_loss_on_probabilities_teaches_a_distribution(
    training: tinker.TrainingClient, decision_renderer: decisions.DecisionRenderer
) -> None:
    """`forward_backward_custom` with [N, K] targets; its loss is that of the probabilities sampled."""
    text, target = DESK[0][0], {"billing": 0.5, "sdk": 0.25, "console": 0.25}
    data = decisions.decision_dist_datums(decision_renderer, [(decision(text), target)])
    brier = decisions.probability_loss(lambda found, wanted: ((found - wanted) ** 2).sum())
    (before,) = decided(training, decision_renderer, [text])
    losses = []
    for _ in range(10):
        backward = training.forward_backward_custom(data, brier)
        step(training, 1e-3)
        losses.append(backward.result().metrics["loss"])
    (after,) = decided(training, decision_renderer, [text])
    assert losses[0] == pytest.approx(sum((before[team] - target[team]) ** 2 for team in TEAMS), abs=1e-4)
    assert losses[-1] < losses[0] / 10
    assert after == pytest.approx(target, abs=0.1)

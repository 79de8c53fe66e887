"""All combinations of planner, tenants and ranks train as a naive loop does with one tenant and one datum."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.training.support.matrix import Bench, Combination, Results
from tests.training.support.naive import LONGEST, Naive, Trained, schedule

TENANTS = (1, 2, 5)
UNIT_TOKENS = (1, 16384)
TOKEN_BUDGETS = (LONGEST, 2048)
RANKS = (1, 2, 4)
COMBINATIONS = [Combination(*each) for each in itertools.product(TENANTS, UNIT_TOKENS, TOKEN_BUDGETS)]
CORNERS = [each for each in COMBINATIONS if each.tenants == max(TENANTS)]


def _param(combination: Combination, *ranks: int) -> Any:
    marks = () if combination in CORNERS and 4 not in ranks else pytest.mark.long
    return pytest.param(combination, *ranks, id=" ".join(map(str, (combination, *ranks))), marks=marks)


@pytest.fixture(scope="module")
def bench(ray_cluster: None, tied_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("matrix"), tied_model)
    yield made
    made.close()


@pytest.fixture(scope="module")
def alone(bench: Bench, tied_model: str) -> Results:
    """Results of the naive loop, from the same new models."""
    made = bench.results(1, COMBINATIONS[-1])
    return {
        tenant: Naive(tied_model, trained.weights[0]).train(schedule(tenant))
        for tenant, trained in made.items()
    }


@pytest.mark.parametrize(
    ("combination", "ranks"), [_param(*each) for each in itertools.product(COMBINATIONS, RANKS)]
)
def test_every_combination_equals_the_naive_loop(
    bench: Bench, alone: Results, combination: Combination, ranks: int
) -> None:
    for tenant, trained in bench.results(ranks, combination).items():
        _assert_close_losses(trained, alone[tenant])
        for found, expected in _arrays(trained, alone[tenant]):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("combination", [_param(each) for each in COMBINATIONS])
def test_on_one_rank_neither_the_others_nor_the_planner_change_a_bit(
    bench: Bench, combination: Combination
) -> None:
    """Only the trainer's own setting of how long its rows are does."""
    most = replace(combination, tenants=max(TENANTS), unit_tokens=max(UNIT_TOKENS))
    for tenant, trained in bench.results(1, combination).items():
        other = bench.results(1, most)[tenant]
        assert trained.losses == other.losses
        for found, expected in _arrays(trained, other):
            np.testing.assert_array_equal(found, expected)


def _assert_close_losses(found: Trained, expected: Trained) -> None:
    """A loss is a sum over tokens."""
    for loss, other, logprobs in zip(found.losses, expected.losses, found.logprobs, strict=True):
        tokens = sum(array.size for array in logprobs)
        assert loss == pytest.approx(other, rel=1e-5, abs=1e-5 * tokens)


def _arrays(found: Trained, expected: Trained) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Logprobs of all datums, and weights after all steps."""
    for ours, others in zip(found.logprobs, expected.logprobs, strict=True):
        yield from zip(ours, others, strict=True)
    for adapter, other in zip(found.weights, expected.weights, strict=True):
        assert adapter.keys() == other.keys()
        yield from ((array, other[name]) for name, array in adapter.items())

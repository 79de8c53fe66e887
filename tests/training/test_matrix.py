"""All combinations of planner, tenants and ranks train as a naive loop does with one tenant and one datum."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from tests.training.matrix import Bench, Combination, Results
from tests.training.naive import LONGEST, Naive, schedule

TENANTS = (1, 2, 5)
UNIT_TOKENS = (1, 16384)
TOKEN_BUDGETS = (LONGEST, 2048)
RANKS = (1, 2, 4)
COMBINATIONS = [Combination(*each) for each in itertools.product(TENANTS, UNIT_TOKENS, TOKEN_BUDGETS)]


@pytest.fixture(scope="module")
def bench(ray_cluster: None, tied_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("matrix"), tied_model, RANKS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def alone(bench: Bench, tied_model: str) -> Results:
    """By the naive loop, from the same new models."""
    made = bench.results(1, COMBINATIONS[-1])
    return {
        tenant: Naive(tied_model, trained.weights[0]).train(schedule(tenant))
        for tenant, trained in made.items()
    }


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_every_combination_equals_the_naive_loop(
    bench: Bench, alone: Results, ranks: int, combination: Combination
) -> None:
    for tenant, trained in bench.results(ranks, combination).items():
        naive = alone[tenant]
        for loss, logprobs, *other in zip(
            trained.losses, trained.logprobs, naive.losses, naive.logprobs, strict=True
        ):
            tokens = sum(array.size for array in logprobs)
            assert loss == pytest.approx(other[0], rel=1e-5, abs=1e-5 * tokens)
            for found, expected in zip(logprobs, other[1], strict=True):
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        for adapter, expected_adapter in zip(trained.weights[1:], naive.weights, strict=True):
            assert adapter.keys() == expected_adapter.keys()
            for name, array in adapter.items():
                np.testing.assert_allclose(array, expected_adapter[name], rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("combination", COMBINATIONS[:-1], ids=str)
def test_on_one_rank_all_combinations_are_equal_to_the_last_bit(
    bench: Bench, combination: Combination
) -> None:
    last = bench.results(1, COMBINATIONS[-1])
    for tenant, trained in bench.results(1, combination).items():
        assert trained.losses == last[tenant].losses
        for found, expected in zip(trained.logprobs, last[tenant].logprobs, strict=True):
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one, other)
        for adapter, other_adapter in zip(trained.weights, last[tenant].weights, strict=True):
            for name, array in adapter.items():
                np.testing.assert_array_equal(array, other_adapter[name], err_msg=name)

"""Every loss against its definition (naive.py): values, gradients, and which datums they depend on."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from skyrl_tinker.domain.loss_specs import LOSSES
from skyrl_tinker.training.losses import LOSS_FUNCTIONS
from tests.training.losses.support import naive
from tests.training.losses.support.cases import CASES, CONFIGS, NAMES, datums_of, make, run

STEP = 1e-6


def test_the_cases_cover_every_loss_and_every_key() -> None:
    assert set(NAMES) == LOSSES.keys() - {"custom"}
    for name, configs in CONFIGS.items():
        assert set().union(*configs) >= LOSSES[name].config.keys(), name


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("name", "config"), CASES)
def test_values_are_those_of_the_definition(name: str, config: Mapping[str, float], seed: int) -> None:
    logprobs, request = make(name, config, seed)
    values, _, _ = run(name, logprobs, request)
    point = logprobs.tolist()
    expected = naive.LOSSES[name](point, point, request)
    np.testing.assert_allclose(values.numpy(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("name", "config"), CASES)
def test_gradients_are_the_definition_s_finite_differences(
    name: str, config: Mapping[str, float], seed: int
) -> None:
    logprobs, request = make(name, config, seed)
    _, gradient, _ = run(name, logprobs, request)
    point = logprobs.tolist()
    above = naive.LOSSES[name]((logprobs + STEP).tolist(), point, request)
    below = naive.LOSSES[name]((logprobs - STEP).tolist(), point, request)
    expected = (np.array(above) - np.array(below)) / (2 * STEP)
    np.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_float32_agrees_with_the_definition(name: str) -> None:
    logprobs, request = make(name)
    values, _, _ = run(name, logprobs.float(), request)
    point = logprobs.tolist()
    expected = naive.LOSSES[name](point, point, request)
    assert values.dtype == torch.float32
    np.testing.assert_allclose(values.numpy(), expected, rtol=3e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in NAMES if not LOSSES[name].whole_request])
def test_a_datum_s_values_are_the_same_bits_whatever_is_beside_it(name: str) -> None:
    logprobs, request = make(name)
    logprobs = logprobs.float()
    values, gradient, _ = run(name, logprobs, request)
    for part, alone in datums_of(request):
        own_values, own_gradient, _ = run(name, logprobs[part], alone)
        assert torch.equal(own_values, values[part])
        assert torch.equal(own_gradient, gradient[part])


@pytest.mark.parametrize("name", NAMES)
def test_metric_names_have_one_colon_and_a_known_reduction(name: str) -> None:
    metrics = run(name, *make(name))[2]
    assert metrics
    assert all(key.count(":") == 1 for key in metrics)
    assert {key.split(":")[1] for key in metrics} <= {"sum", "min", "max", "mean"}


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_leaves_the_global_random_state_alone(name: str) -> None:
    logprobs, request = make(name)
    before = torch.get_rng_state()
    run(name, logprobs, request)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", NAMES)
def test_functions_carry_the_name_of_their_loss(name: str) -> None:
    assert LOSS_FUNCTIONS[name].__name__ == name
    assert LOSS_FUNCTIONS[name].__doc__

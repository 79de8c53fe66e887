"""Tokens that clip_cov and kl_cov select."""

import numpy as np
import pytest
import torch

from skyrl_tinker.training.losses.covariance import covariances, share
from tests.training.losses.support import naive
from tests.training.losses.support.cases import filled, make, run


def many(name: str, count: int = 4000, **config: float) -> tuple[torch.Tensor, naive.Request]:
    """Make on-policy tokens, so that nothing is clipped."""
    rng = np.random.default_rng(3)
    logprobs = rng.normal(-5.0, 2.0, count)
    inputs = {"logprobs": logprobs.tolist(), "advantages": rng.integers(-1, 2, count).astype(float).tolist()}
    return torch.from_numpy(logprobs), naive.Request(inputs, ((count,),), filled(name, config), seed=11)


def dropped(request: naive.Request, logprobs: torch.Tensor) -> set[int]:
    values, gradient, metrics = run("clip_cov", logprobs, request)
    advantages = np.array(request.inputs["advantages"])
    found = np.flatnonzero((values.numpy() == 0) & (gradient.numpy() == 0) & (advantages != 0))
    assert metrics["masked_tokens:sum"] == len(found)
    return set(found.tolist())


def test_clip_cov_drops_the_asked_share_from_between_the_bounds() -> None:
    logprobs, request = many("clip_cov", clip_cov_ratio=0.05)
    found = dropped(request, logprobs)
    covariances = naive.covariances(logprobs.tolist(), request.inputs["advantages"])
    assert len(found) == int(0.05 * len(covariances))
    assert all(1.0 < covariances[i] < 5.0 for i in found)


def test_clip_cov_draws_by_the_seed_of_the_request() -> None:
    logprobs, request = many("clip_cov", clip_cov_ratio=0.05)
    other = naive.Request(request.inputs, request.shapes, request.config, seed=12)
    torch.manual_seed(1)
    first = dropped(request, logprobs)
    torch.manual_seed(2)
    assert dropped(request, logprobs) == first
    assert dropped(other, logprobs) != first


def test_clip_cov_drops_all_candidates_if_there_are_fewer_than_asked_for() -> None:
    logprobs, request = many("clip_cov", clip_cov_ratio=1.0)
    covariances = naive.covariances(logprobs.tolist(), request.inputs["advantages"])
    assert dropped(request, logprobs) == {i for i, value in covariances.items() if 1.0 < value < 5.0}


def test_a_share_of_zero_leaves_the_plain_losses() -> None:
    for name, key, plain in (
        ("clip_cov", "clip_cov_ratio", "regular"),
        ("kl_cov", "kl_cov_ratio", "importance_sampling"),
    ):
        logprobs, request = make(name, {key: 0.0})
        values, gradient, _ = run(name, logprobs, request)
        expected, expected_gradient, _ = run(plain, logprobs, request)
        assert torch.equal(values, expected)
        assert torch.equal(gradient, expected_gradient)


def test_kl_cov_penalizes_the_largest_covariances() -> None:
    logprobs, request = many("kl_cov", kl_cov_ratio=0.01)
    logprobs = logprobs + 0.1
    values, _, metrics = run("kl_cov", logprobs, request)
    plain, _, _ = run("importance_sampling", logprobs, request)
    found = set(np.flatnonzero((values - plain).abs().numpy() > 1e-9).tolist())
    covariances = naive.covariances(logprobs.tolist(), request.inputs["advantages"])
    largest = sorted(covariances, key=lambda i: -covariances[i])[: int(0.01 * len(covariances))]
    assert found == set(largest)
    assert metrics["penalized_tokens:sum"] == len(largest)


def test_tokens_without_an_advantage_are_no_part_of_the_statistics() -> None:
    for name in ("clip_cov", "kl_cov"):
        logprobs, request = make(name, {f"{name}_ratio": 0.3})
        advantages = request.inputs["advantages"]
        moved = torch.tensor([0.0 if a else -9.0 for a in advantages]).double()
        values, _, _ = run(name, logprobs, request)
        others, _, _ = run(name, logprobs + moved, request)
        assert torch.equal(values, others)


def test_without_any_advantage_there_is_no_loss() -> None:
    for name in ("clip_cov", "kl_cov"):
        logprobs, request = make(name)
        idle = {**request.inputs, "advantages": [0.0] * len(logprobs)}
        values, gradient, _ = run(name, logprobs, naive.Request(idle, request.shapes, request.config))
        assert not values.any()
        assert not gradient.any()


def test_a_share_is_at_least_one_token_unless_it_is_zero() -> None:
    assert [share(2e-4, 100), share(0.5, 7), share(0.0, 100), share(1.0, 0)] == [1, 3, 0, 0]


def test_covariances_are_numbers_where_a_sum_of_advantages_is_beyond_float32() -> None:
    logprobs, advantages = [-1.0, -2.0, -3.0, -4.0, -5.0], [3e38, 3e38, -1e38, 0.0, 3e38]
    found = covariances(torch.tensor(logprobs), torch.tensor(advantages)).tolist()
    expected = naive.covariances(logprobs, advantages)
    assert found[3] == -torch.inf
    assert {index: found[index] for index in expected} == pytest.approx(expected, rel=1e-5)

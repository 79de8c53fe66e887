import torch

from tests.training.losses.support.cases import make, run
from tests.training.losses.support.naive import Request

NAME = "stable_reinforce"


def on_policy(**config: float) -> tuple[torch.Tensor, Request]:
    logprobs, request = make(NAME, config)
    logprobs = logprobs.float()
    inputs = {**request.inputs, "sampling_logprobs": logprobs.tolist()}
    return logprobs, Request(inputs, request.shapes, request.config)


def tensor(request: Request, name: str) -> torch.Tensor:
    return torch.tensor(request.inputs[name])


def test_on_policy_its_gradient_is_that_of_plain_reinforce_to_the_bit() -> None:
    for config in ({}, {"kl_coeff": 5.0}, {"ratio_cap": 1.0, "mask_low": 1.0, "mask_high": 1.0}):
        logprobs, request = on_policy(**config)
        _, gradient, metrics = run(NAME, logprobs, request)
        assert torch.equal(gradient, -tensor(request, "advantages") * tensor(request, "sampled"))
        assert metrics["masked_tokens:sum"] == metrics["clipped_tokens:sum"] == 0
        assert metrics["kl_sampler_policy:sum"] == 0


def test_tokens_that_were_not_sampled_give_nothing() -> None:
    logprobs, request = make(NAME, {"mask_low": 0.0, "mask_high": 1e6})
    values, gradient, _ = run(NAME, logprobs, request)
    prompt = tensor(request, "sampled") == 0
    assert prompt.any()
    assert not values[prompt].any()
    assert not gradient[prompt].any()


def test_a_masked_token_gives_no_penalty_either() -> None:
    logprobs, request = make(NAME, {"kl_coeff": 100.0})
    values, gradient, metrics = run(NAME, logprobs, request)
    ratio = (logprobs - tensor(request, "sampling_logprobs")).exp()
    masked = ((ratio < 0.5) | (ratio > 5.0)) & (tensor(request, "sampled") == 1)
    assert metrics["masked_tokens:sum"] == masked.sum() > 2
    assert not values[masked].any()
    assert not gradient[masked].any()


def test_the_penalty_pulls_towards_the_sampler() -> None:
    logprobs, request = make(NAME, {"kl_coeff": 1.0})
    plain = Request(request.inputs, request.shapes, {**request.config, "kl_coeff": 0.0})
    pull = run(NAME, logprobs, request)[1] - run(NAME, logprobs, plain)[1]
    distance = logprobs - tensor(request, "sampling_logprobs").double()
    kept = pull != 0
    assert kept.sum() > 10
    torch.testing.assert_close(pull[kept], distance[kept], rtol=1e-6, atol=1e-6)

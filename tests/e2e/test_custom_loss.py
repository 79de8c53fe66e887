"""Losses that clients make: run on the server they do what the same function does on the client."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.e2e.support.client import Client, logprobs_of, random_tokens

Result = tuple[torch.Tensor, Mapping[str, torch.Tensor]]
ROWS = [random_tokens(count, seed=60 + count) for count in (12, 5, 20)]
CANDIDATES = 3


def clipped(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> Result:
    ratio = torch.exp(logprobs - old)
    kept = torch.clamp(ratio, 0.8, 1.2)
    loss = -torch.minimum(ratio * advantages, kept * advantages).sum() + 0.1 * logprobs.square().mean()
    return loss, {"custom/clipped:sum": (ratio != kept).sum(), "custom/ratio:mean": ratio.mean()}


def distilled(logprobs: torch.Tensor, teacher: torch.Tensor, scale: torch.Tensor) -> Result:
    chances = torch.softmax(teacher, -1)
    divergence = (chances * (chances.log() - logprobs)).sum(-1)
    return divergence.mean() * scale, {"custom/kl:mean": divergence.sum()}


def tensors(**arrays: np.ndarray) -> dict[str, types.TensorData]:
    return {key: types.TensorData.from_numpy(value) for key, value in arrays.items()}


def example(tokens: list[int], targets: np.ndarray, **arrays: np.ndarray) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs=tensors(target_tokens=targets, **arrays),
    )


def flat_data() -> list[types.Datum]:
    random = np.random.default_rng(1)
    return [
        example(
            tokens,
            np.asarray(tokens[1:]),
            old=random.normal(-6, 1, len(tokens) - 1).astype(np.float32),
            advantages=random.normal(0, 1, len(tokens) - 1).astype(np.float32),
        )
        for tokens in ROWS
    ]


def candidate_data() -> list[types.Datum]:
    random = np.random.default_rng(2)
    shapes = [(len(tokens) - 1, CANDIDATES) for tokens in ROWS]
    return [
        example(
            tokens,
            random.integers(3, 400, shape),
            teacher=random.normal(0, 1, shape).astype(np.float32),
            scale=np.asarray(0.5 + index, np.float32),
        )
        for index, (tokens, shape) in enumerate(zip(ROWS, shapes, strict=True))
    ]


CASES: dict[str, tuple[Callable[..., Result], dict[str, int], list[types.Datum]]] = {
    "one target per position": (clipped, {"logprobs": 1, "old": 1, "advantages": 1}, flat_data()),
    "several candidates": (distilled, {"logprobs": 2, "teacher": 2, "scale": 0}, candidate_data()),
}


@pytest.fixture(scope="module")
def handles(service: tinker.ServiceClient) -> dict[str, Any]:
    """A session creates each loss once."""
    created = {
        case: service.create_custom_loss(function, ranks) for case, (function, ranks, _) in CASES.items()
    }
    return {case: pending.result() for case, pending in created.items()}


def on_the_client(function: Callable[..., Result], names: list[str]) -> Callable[..., Any]:
    def loss(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        total, sums = torch.zeros(()), dict[str, float]()
        for each, row in zip(data, logprobs, strict=True):
            value, metrics = function(row, *(each.loss_fn_inputs[name].to_torch() for name in names))
            total = total + value
            for key, metric in metrics.items():
                sums[key] = sums.get(key, 0.0) + float(metric.detach())
        count = len(data)
        return total, {key: value / count if key.endswith(":mean") else value for key, value in sums.items()}

    return loss


def learn(training: tinker.TrainingClient, data: list[types.Datum], loss: Any) -> Any:
    backward = training.forward_backward_custom(data, loss)
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return backward.result()


@pytest.mark.parametrize("case", CASES)
def test_the_server_does_what_the_client_would(client: Client, handles: dict[str, Any], case: str) -> None:
    function, ranks, data = CASES[case]
    assert handles[case].loss_id is not None
    here, there = client.new_lora(), client.new_lora()
    expected = learn(here, data, on_the_client(function, list(ranks)[1:]))
    found = learn(there, data, handles[case])
    assert found.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5)
    for key in (key for key in expected.metrics if key.startswith("custom/")):
        assert found.metrics[key] == pytest.approx(expected.metrics[key], rel=1e-5), key
    for one, other in zip(found.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
        np.testing.assert_array_equal(one["logprobs"].to_numpy(), other["logprobs"].to_numpy())
    for tokens in ROWS:
        np.testing.assert_allclose(logprobs_of(there, tokens), logprobs_of(here, tokens), atol=1e-5)


def test_a_loss_that_the_server_does_not_allow_says_why(service: tinker.ServiceClient) -> None:
    def noisy(logprobs: torch.Tensor) -> Result:
        return (logprobs * torch.rand_like(logprobs)).sum(), {}

    with pytest.raises(tinker.RequestFailedError, match=r"torch\.rand_like.* not among the functions"):
        service.create_custom_loss(noisy, {"logprobs": 1}).result()


@pytest.fixture
def stranger(client: Client) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=client.url) as other:
        yield other


def test_a_loss_of_another_session_is_refused(
    client: Client, handles: dict[str, Any], stranger: tinker.ServiceClient
) -> None:
    training = stranger.create_lora_training_client(base_model=client.model, rank=4).result()
    loss_id = handles["one target per position"].loss_id
    for unknown in (loss_id, "nobody"):
        refused = training.forward_backward(flat_data(), "custom", {"loss_id": unknown})
        with pytest.raises(tinker.RequestFailedError, match=rf"loss_id.*{unknown}.*another session"):
            refused.result()


def test_a_loss_that_fails_leaves_its_neighbours_alone(client: Client, service: tinker.ServiceClient) -> None:
    def greedy(logprobs: torch.Tensor, size: torch.Tensor) -> Result:
        return logprobs.repeat(10**7).sum() * size, {}

    handle = service.create_custom_loss(greedy, {"logprobs": 1, "size": 0}).result()
    alone, beside, bad = client.new_lora(), client.new_lora(), client.new_lora()
    data = [example(ROWS[0], np.asarray(ROWS[0][1:]), size=np.asarray(1.0, np.float32))]
    refused = bad.forward_backward_custom(data, handle)
    fine = on_the_client(clipped, ["old", "advantages"])
    learn(beside, flat_data(), fine)
    learn(alone, flat_data(), fine)
    with pytest.raises(tinker.RequestFailedError, match=r"custom loss 'greedy'.*node 'repeat'.*elements"):
        refused.result()
    np.testing.assert_array_equal(logprobs_of(beside, ROWS[0]), logprobs_of(alone, ROWS[0]))

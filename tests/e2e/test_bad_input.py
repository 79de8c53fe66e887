"""A bad request fails at once, names what is wrong, and touches nothing beyond its own window."""

from collections.abc import Callable

import numpy as np
import pytest
import tinker
from tinker import types

from tests.e2e.support.client import Client, datum, logprobs_of, random_tokens, train

GOOD = random_tokens(10, seed=3)


def tensors(**arrays: np.ndarray) -> dict[str, types.TensorData]:
    return {key: types.TensorData.from_numpy(value) for key, value in arrays.items()}


def raw(tokens: list[int], **arrays: np.ndarray) -> types.Datum:
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=tensors(**arrays))


def _ones(count: int) -> np.ndarray:
    return np.ones(count, dtype=np.float32)


def _targets(count: int) -> np.ndarray:
    return np.full(count, 5, dtype=np.int64)


NAN = np.array([1.0, np.nan, 1.0], dtype=np.float32)

BAD: dict[str, tuple[types.Datum, str]] = {
    "token beyond the vocabulary": (
        raw([1, 10**6, 2], target_tokens=_targets(3), weights=_ones(3)),
        r"datum 1.*1000000",
    ),
    "target beyond the vocabulary": (
        raw([1, 2, 3], target_tokens=np.array([1, 2, 10**6]), weights=_ones(3)),
        r"datum 1.*target_tokens.*1000000",
    ),
    "lengths differ": (
        raw([1, 2, 3], target_tokens=_targets(3), weights=_ones(2)),
        r"datum 1.*weights.*2.*3",
    ),
    "not a number": (raw([1, 2, 3], target_tokens=_targets(3), weights=NAN), r"datum 1.*weights"),
    "missing input": (raw([1, 2, 3], weights=_ones(3)), r"datum 1.*target_tokens"),
    "too long": (raw([1] * 5000, target_tokens=_targets(5000), weights=_ones(5000)), r"datum 1.*5000"),
    "empty": (raw([], target_tokens=_targets(0), weights=_ones(0)), r"datum 1.*empty|datum 1.*0"),
    "weights of another shape": (
        raw([1, 2], target_tokens=np.ones((2, 3), dtype=np.int64), weights=np.ones((2, 2), dtype=np.float32)),
        r"datum 1.*weights.*\[2, 2\], expected \[2, 3\]",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_datum_is_named_and_leaves_weights_and_neighbours_alone(client: Client, case: str) -> None:
    bad, message = BAD[case]
    training, neighbour = client.new_lora(), client.new_lora(seed=2)
    before = logprobs_of(training, GOOD)
    refused = training.forward_backward([datum(GOOD), bad], "cross_entropy")
    fine = neighbour.forward_backward([datum(GOOD)], "cross_entropy")
    step = training.optim_step(types.AdamParams(learning_rate=1.0))
    with pytest.raises(tinker.RequestFailedError, match=message) as failure:
        refused.result(timeout=120)
    assert str(failure.value.category).lower().endswith("user")
    with pytest.raises(tinker.RequestFailedError, match="forward_backward"):
        step.result(timeout=120)
    assert fine.result(timeout=120).metrics["loss:sum"] > 0
    np.testing.assert_array_equal(logprobs_of(training, GOOD), before)


REFUSED: dict[str, tuple[Callable[[tinker.TrainingClient], object], str]] = {
    "unknown loss": (lambda t: t.forward_backward([datum(GOOD)], "no_such_loss"), "no_such_loss"),
    "a loss that there is not": (lambda t: t.forward_backward([datum(GOOD)], "critic"), "critic"),
    "unknown config key": (
        lambda t: t.forward_backward([datum(GOOD)], "cross_entropy", {"no_such_key": 1.0}),
        "no_such_key",
    ),
    "no data": (lambda t: t.forward_backward([datum(GOOD)] * 0, "cross_entropy"), "data"),
    "missing RL input": (lambda t: t.forward_backward([datum(GOOD)], "importance_sampling"), "logprobs"),
    "negative learning rate": (lambda t: t.optim_step(types.AdamParams(learning_rate=-1.0)), "learning_rate"),
    "bad name": (lambda t: t.save_state("no spaces please"), "name"),
}


@pytest.mark.parametrize("case", [name for name in REFUSED if name != "no data"])
def test_a_refused_request_says_why_and_the_next_window_is_clean(client: Client, case: str) -> None:
    send, message = REFUSED[case]
    training = client.new_lora()
    before = logprobs_of(training, GOOD)
    with pytest.raises(tinker.RequestFailedError, match=message):
        send(training).result(timeout=120)  # type: ignore[attr-defined]
    if "step" not in case and "forward_backward" in case:
        with pytest.raises(tinker.RequestFailedError):
            training.optim_step(types.AdamParams(learning_rate=1.0)).result(timeout=120)
    np.testing.assert_array_equal(logprobs_of(training, GOOD), before)


def test_the_window_after_a_failed_one_trains(client: Client) -> None:
    training = client.new_lora()
    with pytest.raises(tinker.RequestFailedError):
        training.forward_backward([BAD["not a number"][0]], "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError):
        training.optim_step(types.AdamParams()).result()
    before = logprobs_of(training, GOOD)
    train(training, GOOD)
    assert np.abs(logprobs_of(training, GOOD) - before).max() > 1e-3


def test_a_failed_forward_only_pass_does_not_fail_the_step(client: Client) -> None:
    training = client.new_lora()
    with pytest.raises(tinker.RequestFailedError):
        training.forward([BAD["not a number"][0]], "cross_entropy").result()
    train(training, GOOD)


def test_a_wrong_base_model_fails_at_creation(client: Client) -> None:
    with pytest.raises(tinker.TinkerError, match="no-such-model"):
        client.service.create_lora_training_client(base_model="no-such-model").result()


def test_a_rank_above_the_limit_names_the_setting(client: Client) -> None:
    with pytest.raises(tinker.TinkerError, match=r"max.lora.rank"):
        client.new_lora(rank=1000)

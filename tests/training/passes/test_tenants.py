from dataclasses import replace

import numpy as np
import pytest
import torch

from skyrl_tinker.domain.ids import ModelKey, RequestId
from skyrl_tinker.domain.values import AdamParams, Datum, Failure, LoraSpec, PassItem, PassOutput, StepItem
from skyrl_tinker.errors import StateLostError
from skyrl_tinker.training.batching.batch import build_batch
from skyrl_tinker.training.batching.outputs import own_seconds
from skyrl_tinker.training.worker import Worker
from tests.training.conftest import MakeWorker
from tests.training.losses.support.uploads import upload
from tests.training.support.passes import (
    assert_close,
    assert_equal,
    gradients_of,
    make_data,
    make_item,
    perturb,
    run_one,
    run_pass,
    step,
    weights_of,
)

SPECS = {1: LoraSpec(4, 1), 2: LoraSpec(16, 2, train_mlp=False), 3: LoraSpec(1, 3, train_attn=False)}
LOSS_FNS = {1: "cross_entropy", 2: "ppo", 3: "importance_sampling"}


def _with_models(worker: Worker, *models: int) -> Worker:
    for model in models:
        worker.create_model(ModelKey(model), SPECS[model])
        perturb(worker, model)
    return worker


def _item(model: int, seed: int, *, backward: bool = True) -> PassItem:
    loss_fn = LOSS_FNS[model]
    return make_item(model, make_data((40, 10, 70, 10), seed, loss_fn), loss_fn, backward=backward)


def test_models_trained_interleaved_equal_the_same_trained_alone(
    make_worker: MakeWorker, untied_model: str
) -> None:
    together = _with_models(make_worker(untied_model), 1, 2)
    for number in range(3):
        run_one(together, _item(1, number))
        run_one(together, _item(2, number))
        step(together, 2)
        step(together, 1)
    for model in (1, 2):
        alone = _with_models(make_worker(untied_model), model)
        for number in range(3):
            run_one(alone, _item(model, number))
            step(alone, model)
        assert_equal(weights_of(together, model), weights_of(alone, model))


@pytest.mark.parametrize("budget", [64, 4096])
def test_a_mixed_pass_equals_separate_passes(
    make_worker: MakeWorker, model_directory: str, budget: int
) -> None:
    mixed = _with_models(make_worker(model_directory, budget), 1, 2, 3)
    items = [_item(3, 1), _item(1, 2), _item(2, 3), _item(1, 4, backward=False)]
    outputs = run_pass(mixed, *items)
    for item, output in zip(items, outputs, strict=True):
        separate = _with_models(make_worker(model_directory, budget), item.model)
        expected = run_one(separate, item)
        assert isinstance(output, PassOutput)
        for one, other in zip(output.logprobs, expected.logprobs, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5, rtol=0)
        assert output.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-4)
        if item.backward:
            assert_close(gradients_of(mixed, item.model), gradients_of(separate, item.model), 1e-6)


def _poisoned(seed: int, lengths: tuple[int, ...]) -> tuple[Datum, ...]:
    """The last datum's ratio overflows: exp(logp + 1e5)."""
    *good, bad = make_data(lengths, seed, "importance_sampling")
    inputs = dict(bad.inputs) | {"logprobs": np.full(len(bad.tokens), -1e5, np.float32)}
    return (*good, Datum(bad.tokens, bad.target_tokens, inputs))


def test_weights_that_diverged_are_named_and_no_input_is(make_worker: MakeWorker, untied_model: str) -> None:
    worker = _with_models(make_worker(untied_model), 1, 2)
    run_one(worker, _item(1, 1))
    step(worker, 1, AdamParams(1e30))
    failure, _ = run_pass(worker, _item(1, 2), _item(2, 1))
    assert isinstance(failure, Failure)
    found = (
        "datum 0, position 0: expected a finite logprob, found nan: the weights of this model have diverged"
    )
    assert failure.message.startswith(found)


@pytest.mark.parametrize("budget", [64, 4096])
def test_a_failing_request_leaves_its_neighbours_bit_equal(
    make_worker: MakeWorker, untied_model: str, budget: int
) -> None:
    """Also its own model's earlier gradients, and also when earlier rows of it were good."""
    bad = make_item(1, _poisoned(9, (40, 50, 60, 30)), "importance_sampling")
    workers = [_with_models(make_worker(untied_model, budget), 1, 2) for _ in range(2)]
    outputs = []
    for worker, items in zip(
        workers, ([_item(2, 2), bad, _item(1, 3)], [_item(2, 2), _item(1, 3)]), strict=True
    ):
        run_one(worker, _item(1, 1))
        outputs.append(run_pass(worker, *items))
    (two, failure, one), expected = outputs
    assert isinstance(failure, Failure)
    assert failure.category == "user"
    assert failure.message.startswith("datum 3, position 1: expected a finite importance_sampling loss")
    for found, other in zip((two, one), expected, strict=True):
        assert isinstance(found, PassOutput)
        assert isinstance(other, PassOutput)
        assert found.metrics == other.metrics
        for a, b in zip(found.logprobs, other.logprobs, strict=True):
            np.testing.assert_array_equal(a, b)
    for model in (1, 2):
        assert_equal(gradients_of(workers[0], model), gradients_of(workers[1], model))


def test_a_pass_whose_only_request_fails_leaves_no_gradients(worker: Worker) -> None:
    _with_models(worker, 1)
    (output,) = run_pass(worker, make_item(1, _poisoned(9, (40, 30)), "importance_sampling"))
    assert isinstance(output, Failure)
    assert step(worker, 1).metrics["no_gradients"] == 1.0


def test_a_failing_forward_only_request_fails_alone(worker: Worker) -> None:
    _with_models(worker, 1)
    bad = make_item(1, _poisoned(9, (40, 30)), "importance_sampling", backward=False)
    output, failure = run_pass(worker, _item(1, 1), bad)
    assert isinstance(output, PassOutput)
    assert isinstance(failure, Failure)


def test_a_request_that_has_failed_in_a_row_is_not_tried_in_later_ones(
    make_worker: MakeWorker, untied_model: str
) -> None:
    """A custom loss that runs out of time does so once; and what is named is what failed first."""
    worker = _with_models(make_worker(untied_model, 64), 1)
    (first,), (second,) = _poisoned(9, (50,)), _poisoned(8, (60,))
    (failure,) = run_pass(worker, make_item(1, (first, second), "importance_sampling"))
    assert isinstance(failure, Failure)
    assert failure.message.startswith("datum 0, ")


def test_of_a_custom_loss_the_datum_whose_gradient_is_not_finite_is_named(worker: Worker) -> None:
    """Though every value is finite: the root of zero has no gradient."""
    _with_models(worker, 1)
    loss = upload(lambda logprobs, scale: ((logprobs * scale).sum().sqrt(), {}), logprobs=1, scale=0)
    scales = [-1.0, -1.0, 0.0, -1.0]
    data = tuple(
        replace(datum, inputs={"scale": np.float32(scale)})
        for datum, scale in zip(make_data((5, 9, 7, 4), 1, "custom"), scales, strict=True)
    )
    own = PassItem(RequestId("own"), ModelKey(1), data, "custom", {}, True, 0, loss)
    (failure,) = run_pass(worker, own)
    assert isinstance(failure, Failure)
    assert failure.message.startswith("datum 2: expected a finite custom loss and gradient, found loss 0.0, ")


def test_what_a_custom_loss_took_is_told(worker: Worker) -> None:
    _with_models(worker, 1, 2)
    loss = upload(lambda logprobs: (logprobs.sum(), {}), logprobs=1)
    plain = make_data((5, 9), 1, "custom")
    own = PassItem(RequestId("own"), ModelKey(2), plain, "custom", {}, True, 0, loss)
    batch = build_batch([_item(1, 1), own])
    told = own_seconds(batch, [worker.run_pass(batch)])
    assert list(told) == ["own"]
    assert told[RequestId("own")] > 0


def test_a_model_without_state_fails_its_requests_only(worker: Worker) -> None:
    _with_models(worker, 1, 2)
    worker.release(ModelKey(2))
    output, failure = run_pass(worker, _item(1, 1), _item(2, 2))
    assert isinstance(output, PassOutput)
    assert isinstance(failure, Failure)
    assert failure.category == "server"
    with pytest.raises(StateLostError, match="model 2"):
        step(worker, 2)


def test_no_model_steps_when_another_of_the_same_call_is_lost(worker: Worker) -> None:
    """The call fails as a whole: what had stepped would be told that it had not."""
    _with_models(worker, 1)
    run_one(worker, _item(1, 1))
    weights, gradients = weights_of(worker, 1), gradients_of(worker, 1)
    steps = [StepItem(RequestId("s"), ModelKey(model), AdamParams(1e-2)) for model in (1, 2)]
    with pytest.raises(StateLostError, match="model 2"):
        worker.optim_step(steps)
    assert_equal(weights_of(worker, 1), weights)
    assert_equal(gradients_of(worker, 1), gradients)


@pytest.mark.parametrize(
    ("spec", "leaves"),
    [
        (LoraSpec(4, 0, False, True, False), {"q_proj", "k_proj", "v_proj", "o_proj"}),
        (LoraSpec(4, 0, True, False, False), {"gate_proj", "up_proj", "down_proj"}),
        (LoraSpec(4, 0, False, False, True), {"lm_head"}),
    ],
)
def test_each_flag_selects_its_layers(
    make_worker: MakeWorker, model_directory: str, spec: LoraSpec, leaves: set[str]
) -> None:
    worker = make_worker(model_directory)
    worker.create_model(ModelKey(1), spec)
    before = weights_of(worker, 1)
    assert {name.split(".")[-3] for name in before} == leaves
    run_one(worker, make_item(1, make_data((30,), 1)))
    step(worker, 1)
    assert all(
        (tensor != before[name]).any() for name, tensor in weights_of(worker, 1).items() if "lora_B" in name
    )


def test_a_seed_fixes_the_adapter_and_layers_differ(worker: Worker) -> None:
    for model, seed in ((1, 5), (2, 5), (3, 6)):
        worker.create_model(ModelKey(model), LoraSpec(8, seed))
    one, same, other = (weights_of(worker, model) for model in (1, 2, 3))
    assert_equal(one, same)
    firsts = [tensor for name, tensor in one.items() if "lora_A" in name and tensor.shape[1] == 64]
    assert not torch.equal(firsts[0], firsts[1])
    assert all((one[name] != other[name]).any() for name in one if "lora_A" in name)
    assert not any(tensor.any() for name, tensor in one.items() if "lora_B" in name)
    assert max(float(tensor.abs().max()) for tensor in firsts) <= 64**-0.5

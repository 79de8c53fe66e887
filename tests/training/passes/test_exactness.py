"""A tenant's numbers among others are its numbers alone, to the last bit on one rank."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import AdamParams, Datum, Failure, LoraSpec, PassItem, PassOutput
from skyrl_tinker.training.losses import LOSS_FUNCTIONS
from skyrl_tinker.training.models.lora import AdaptedLayer, LoraModel
from skyrl_tinker.training.worker import Worker
from tests.training.conftest import MakeWorker
from tests.training.support import reference
from tests.training.support.passes import (
    assert_close,
    assert_equal,
    gradients_of,
    make_data,
    make_item,
    run_one,
    run_pass,
    step,
    weights_of,
)

TENANTS = {
    1: LoraSpec(4, 1),
    2: LoraSpec(16, 2, train_mlp=False),
    3: LoraSpec(1, 3, train_attn=False),
    4: LoraSpec(8, 4, train_unembed=False),
    5: LoraSpec(64, 5, train_mlp=False, train_attn=False),
}
LENGTHS = {1: (40, 10, 70), 2: (1,), 3: (2, 3), 4: (10, 10, 200), 5: (5,)}
"""Also datums that are all alone shorter than what BLAS multiplies in its usual order."""
LOSS_NAMES = sorted(set(LOSS_FUNCTIONS) - {"custom"})


def _worker(make_worker: MakeWorker, directory: str, budget: int, *models: int) -> Worker:
    return make_worker(directory, budget, models={model: TENANTS[model] for model in models})


def _item(model: int, loss_fn: str, seq_id: int, *, backward: bool = True) -> PassItem:
    candidates = 3 if loss_fn == "cross_entropy" and model % 2 else 0
    data = make_data(LENGTHS[model], 10 * model + seq_id, loss_fn, candidates)
    return make_item(model, data, loss_fn, backward=backward, seq_id=seq_id)


def _loss_of(model: int, turn: int) -> str:
    return LOSS_NAMES[(3 * model + turn) % len(LOSS_NAMES)]


def _assert_same_output(found: PassOutput | Failure, expected: PassOutput) -> None:
    assert isinstance(found, PassOutput), found
    assert found.metrics == expected.metrics
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("turn", "budget"),
    [
        pytest.param(turn, budget, marks=[] if turn % 3 == place else pytest.mark.long)
        for turn in range(len(LOSS_NAMES))
        for place, budget in enumerate((16, 64, 4096))
    ],
)
def test_a_mixed_pass_equals_each_tenant_alone_to_the_bit(
    make_worker: MakeWorker, model_directory: str, turn: int, budget: int
) -> None:
    """Five tenants of other ranks, layers and losses; the forward-only request of one is in between."""
    together = _worker(make_worker, model_directory, budget, *TENANTS)
    items = [_item(model, _loss_of(model, turn), 1) for model in (3, 1, 5, 2, 4)]
    items.insert(2, _item(1, _loss_of(2, turn), 2, backward=False))
    outputs = run_pass(together, *items)
    for item, output in zip(items, outputs, strict=True):
        alone = _worker(make_worker, model_directory, budget, item.model)
        _assert_same_output(output, run_one(alone, item))
        if item.backward:
            assert_equal(gradients_of(together, item.model), gradients_of(alone, item.model))


def test_a_short_datum_equals_itself_among_others_to_the_bit(
    make_worker: MakeWorker, wide_model: str
) -> None:
    specs = {model: LoraSpec(8, model) for model in range(1, 18)}
    together = make_worker(wide_model, models=specs)
    items = [make_item(model, make_data((model,), model)) for model in specs]
    for item, output in zip(items, run_pass(together, *items), strict=True):
        alone = make_worker(wide_model, models={item.model: specs[item.model]})
        _assert_same_output(output, run_one(alone, item))
        assert_equal(gradients_of(together, item.model), gradients_of(alone, item.model))


PLAIN = {1: (2,), 2: (8, 3), 3: (1,), 4: (5, 1, 60), 5: (300,), 6: (7,), 7: (90,), 8: (120, 40)}
"""Lengths of tenants that leave the head alone, some of them more than share one go at the logprobs."""


@pytest.mark.parametrize("candidates", [0, 3])
def test_tenants_without_a_head_of_their_own_equal_each_alone_to_the_bit(
    make_worker: MakeWorker, model_directory: str, candidates: int
) -> None:
    def worker_of(*models: int) -> Worker:
        specs = {model: LoraSpec(4 * model, model, train_unembed=False) for model in models}
        return make_worker(model_directory, models=specs)

    items = []
    for model, lengths in PLAIN.items():
        data = make_data(lengths, model, candidates=candidates if model % 2 else 0)
        items.append(make_item(model, data))
    items[3].data[0].inputs["weights"][:] = 0.0
    items[5].data[0].inputs["weights"][:] = 0.0
    together = worker_of(*PLAIN)
    for item, output in zip(items, run_pass(together, *items), strict=True):
        alone = worker_of(item.model)
        _assert_same_output(output, run_one(alone, item))
        assert_equal(gradients_of(together, item.model), gradients_of(alone, item.model))


@pytest.mark.parametrize("budget", [16, 4096])
def test_a_schedule_of_many_tenants_equals_each_tenant_alone_to_the_bit(
    make_worker: MakeWorker, untied_model: str, budget: int
) -> None:
    """Passes, accumulated passes and steps in random order, compared with each tenant alone."""
    rng = np.random.default_rng(budget)
    together = _worker(make_worker, untied_model, budget, *TENANTS)
    alone = {model: _worker(make_worker, untied_model, budget, model) for model in TENANTS}
    for turn in range(8):
        chosen = [model for model in TENANTS if rng.random() < 0.6]
        rng.shuffle(chosen)
        items = [_item(model, _loss_of(model, turn), turn) for model in chosen]
        for item, output in zip(items, run_pass(together, *items) if items else [], strict=True):
            _assert_same_output(output, run_one(alone[item.model], item))
        for model in TENANTS:
            if rng.random() < 0.4:
                adam = AdamParams(1e-2 * model, grad_clip_norm=0.5)
                assert step(together, model, adam).metrics == step(alone[model], model, adam).metrics
    for model, worker in alone.items():
        assert_equal(weights_of(together, model), weights_of(worker, model))


@pytest.mark.parametrize("budget", [16, 4096])
def test_requests_of_a_tenant_in_one_pass_equal_those_in_passes_of_their_own_to_the_bit(
    make_worker: MakeWorker, model_directory: str, budget: int
) -> None:
    """The planner's groups depend on other tenants, so the numbers must not depend on the groups."""
    items = [_item(model, _loss_of(model, turn), turn) for model in TENANTS for turn in range(3)]
    together, apart = (_worker(make_worker, model_directory, budget, *TENANTS) for _ in range(2))
    outputs = run_pass(together, *items)
    for item, output in zip(items, outputs, strict=True):
        _assert_same_output(output, run_one(apart, item))
    for model in TENANTS:
        assert_equal(gradients_of(together, model), gradients_of(apart, model))


@pytest.mark.parametrize("candidates", [1, 4])
def test_candidates_are_scored_and_differentiated_as_a_plain_loop_does(
    make_worker: MakeWorker, model_directory: str, candidates: int
) -> None:
    worker = _worker(make_worker, model_directory, 64, 1)
    data = make_data((5, 300, 1), 3, candidates=candidates)
    data[1].target_tokens[:, -1] = data[1].target_tokens[:, 0]  # one token twice at one position
    output = run_one(worker, make_item(1, data))
    loss, gradients = reference.adapter_gradients(
        model_directory, weights_of(worker, 1), data, reference.cross_entropy
    )
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5, abs=1e-3)
    assert_close(gradients_of(worker, 1), gradients, 1e-5)
    plain = reference.load(model_directory)
    merged = reference.merge(plain, weights_of(worker, 1))
    for datum, found in zip(data, output.logprobs, strict=True):
        expected = reference.logprobs(plain, datum, merged).detach().numpy()
        assert found.shape == datum.target_tokens.shape
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("loss_fn", ["clip_cov", "kl_cov"])
def test_a_loss_over_the_whole_request_does_not_depend_on_its_rows(
    make_worker: MakeWorker, untied_model: str, loss_fn: str
) -> None:
    """Statistics over all tokens of the request, which the small budget cuts into many rows."""
    data = make_data((40, 30, 60, 9), 7, loss_fn)
    config = {"clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_low": 0.0}, "kl_cov": {"kl_cov_ratio": 0.2}}
    item = make_item(1, data, loss_fn, config=config[loss_fn])
    found = []
    for budget in (40, 4096):
        worker = _worker(make_worker, untied_model, budget, 1)
        found.append((run_one(worker, item), gradients_of(worker, 1)))
    (rows, gradients), (one_row, expected) = found
    assert rows.metrics == pytest.approx(one_row.metrics, rel=1e-4)
    assert_close(gradients, expected, 1e-5)


def _overflowing(seed: int) -> tuple[Datum, ...]:
    """The loss of each token is finite; what goes back through the network is not."""
    (datum,) = make_data((30,), seed)
    return (Datum(datum.tokens, datum.target_tokens, {"weights": np.full(30, 3e37, np.float32)}),)


def test_gradients_that_overflow_fail_their_request_and_leave_the_others_bit_equal(
    make_worker: MakeWorker, untied_model: str
) -> None:
    good = [make_item(1, make_data((20,), 1)), make_item(2, make_data((30,), 2))]
    bad = make_item(1, _overflowing(3), seq_id=5)
    workers = [_worker(make_worker, untied_model, 4096, 1, 2) for _ in range(2)]
    run_one(workers[0], good[0])
    run_one(workers[1], good[0])
    first, failure, second = run_pass(workers[0], good[0], bad, good[1])
    expected = run_pass(workers[1], *good)
    assert isinstance(failure, Failure)
    assert "overflow" in failure.message
    for output, other in zip((first, second), expected, strict=True):
        assert isinstance(other, PassOutput)
        _assert_same_output(output, other)
    for model in (1, 2):
        assert_equal(gradients_of(workers[0], model), gradients_of(workers[1], model))


def test_gradients_whose_sum_overflows_are_finite() -> None:
    target = AdaptedLayer("model.layers.0.mlp.up_proj", 8, 8, is_head=False)
    model = LoraModel(LoraSpec(4, 1), [target], torch.device("cpu"))
    (gradients,) = model._local_gradients()
    gradients.fill_(3e38)
    assert not gradients.sum().isfinite()
    assert model.gradients_finite()
    for wrong in (float("nan"), float("inf"), -float("inf")):
        gradients.zero_()[5] = wrong
        assert not model.gradients_finite()


def test_a_pass_that_breaks_leaves_all_gradients_as_they_were(worker: Worker) -> None:
    for model in (1, 2):
        worker.create_model(ModelKey(model), TENANTS[model])
    run_one(worker, make_item(1, make_data((20,), 1)))
    before = {model: gradients_of(worker, model) for model in (1, 2)}
    (datum,) = make_data((600,), 2)
    datum.tokens[300] = 10**6  # no such row of the embedding: the API would not have let it through
    with pytest.raises(IndexError):
        run_pass(worker, make_item(1, make_data((20,), 3)), make_item(2, (datum,)))
    for model, gradients in before.items():
        assert_equal(gradients_of(worker, model), gradients)
    assert torch.stack([tensor.abs().sum() for tensor in before[1].values()]).sum() > 0


@pytest.mark.parametrize("short", [1, 2], ids=["before the pass", "while it looks for who overflowed"])
def test_memory_that_runs_out_between_passes_costs_nobody_his_gradients(
    make_worker: MakeWorker, untied_model: str, monkeypatch: pytest.MonkeyPatch, short: int
) -> None:
    """LoRA models copy their gradients first; copy number `short` does not fit. Then it runs again."""
    early = [make_item(6, make_data((20,), 1)), make_item(1, make_data((20,), 2))]
    late = [make_item(6, make_data((30,), 3)), make_item(1, make_data((30,), 4), seq_id=1)]
    late.append(make_item(1, _overflowing(5), seq_id=2))
    workers = [_worker(make_worker, untied_model, 4096, 1) for _ in range(2)]
    for worker in workers:
        worker.create_model(ModelKey(6), LoraSpec(0, 0))
        run_pass(worker, *early)
    expected = run_pass(workers[0], *late)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", _failing_once(torch.Tensor.clone, short))
        refused = run_pass(workers[1], *late)
    assert all(isinstance(output, Failure) and output.category == "server" for output in refused)
    found = run_pass(workers[1], *late)
    for output, other in zip(found[:2], expected[:2], strict=True):
        assert isinstance(other, PassOutput)
        _assert_same_output(output, other)
    assert isinstance(found[2], Failure)
    for model in (1, 6):
        kept, others = (worker._models[ModelKey(model)]._local_gradients() for worker in workers)
        for gradient, other in zip(kept, others, strict=True):
            assert torch.equal(gradient, other)


def _failing_once(clone: Callable[..., torch.Tensor], number: int) -> Callable[..., torch.Tensor]:
    calls = itertools.count(1)

    def short_of_memory(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        if next(calls) == number:
            raise torch.OutOfMemoryError("no room for a copy")
        return clone(tensor, **options)

    return short_of_memory

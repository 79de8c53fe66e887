import numpy as np
import pytest
import torch

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import Datum, LoraSpec
from skyrl_tinker.training.batching.batch import build_batch
from skyrl_tinker.training.batching.packed_row import Span, make_row
from skyrl_tinker.training.models import logprobs, network
from skyrl_tinker.training.models.logprobs import Head, frozen_logprobs, token_logprobs
from skyrl_tinker.training.models.planned_device import planning
from tests.training.conftest import MakeWorker
from tests.training.support import reference
from tests.training.support.passes import (
    VOCAB,
    assert_close,
    assert_equal,
    gradients_of,
    make_data,
    make_item,
    run_one,
    run_pass,
    weights_of,
)

LENGTHS = (5, 64, 64, 1, 200, 64, 17)


@pytest.mark.parametrize("backward", [True, False])
def test_trainer_logprobs_equal_a_plain_forward(
    make_worker: MakeWorker, model_directory: str, backward: bool
) -> None:
    worker = make_worker(model_directory, token_budget=128)
    worker.create_model(ModelKey(1), LoraSpec(8, 0))
    data = make_data(LENGTHS, 1)
    output = run_one(worker, make_item(1, data, backward=backward))
    plain = reference.load(model_directory)
    for datum, found in zip(data, output.logprobs, strict=True):
        expected = reference.logprobs(plain, datum).detach().numpy()
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


def test_adapted_logprobs_equal_a_forward_with_merged_weights(
    make_worker: MakeWorker, model_directory: str
) -> None:
    worker = make_worker(model_directory, models={1: LoraSpec(8, 0)})
    data = make_data(LENGTHS, 1)
    output = run_one(worker, make_item(1, data))
    plain = reference.load(model_directory)
    merged = reference.merge(plain, weights_of(worker, 1))
    for datum, found in zip(data, output.logprobs, strict=True):
        expected = reference.logprobs(plain, datum, merged).detach().numpy()
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)
        assert np.abs(found - reference.logprobs(plain, datum).detach().numpy()).max() > 1e-2


def test_positions_of_weight_zero_have_logprobs_too(make_worker: MakeWorker, untied_model: str) -> None:
    worker = make_worker(untied_model)
    worker.create_model(ModelKey(1), LoraSpec(8, 0))
    (datum,) = make_data((300,), 1)
    silent = Datum(datum.tokens, datum.target_tokens, {"weights": np.zeros(300, np.float32)})
    (loud,) = run_one(worker, make_item(1, (datum,))).logprobs
    (quiet,) = run_one(worker, make_item(1, (silent,))).logprobs
    np.testing.assert_array_equal(quiet, loud)


@pytest.mark.parametrize("kept", [logprobs.KEPT, 0])
@pytest.mark.parametrize("adapted", [True, False])
@pytest.mark.parametrize("candidates", [None, (0, 1, 5)])
def test_chunked_logprobs_and_gradients_equal_log_softmax(
    candidates: tuple[int, ...] | None, adapted: bool, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One target per token, or as many as come, none at some tokens and one target twice at others."""
    monkeypatch.setattr(logprobs, "KEPT", kept)
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_()

    hidden, weight, inner, outer = leaf(600, 16), leaf(90, 16), leaf(600, 4), leaf(90, 4)
    tokens = torch.arange(600)
    if candidates is not None:
        tokens = tokens.repeat_interleave(torch.tensor(candidates * 200))
    targets = torch.randint(0, 90, (len(tokens),), generator=generator)
    targets[-1] = targets[-2]
    upstream = torch.randn(len(tokens), generator=generator)
    upstream[(tokens >= 256) & (tokens < 512)] = 0.0  # a whole chunk without gradient
    leaves = (hidden, weight, inner, outer) if adapted else (hidden, weight)
    logits = hidden @ weight.T + (inner @ outer.T if adapted else 0.0)
    expected = logits.log_softmax(-1)[tokens, targets]
    head = Head(weight, inner, outer) if adapted else Head(weight)
    found = token_logprobs(hidden, head, targets, None if candidates is None else tokens)
    torch.testing.assert_close(found, expected)
    expected_gradients = torch.autograd.grad(expected, leaves, upstream)
    for again in (True, False):
        found_gradients = torch.autograd.grad(found, leaves, upstream, retain_graph=again)
        for one, other in zip(found_gradients, expected_gradients, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("device", "chunk"), [("cpu", 256), ("cuda", 2048)])
def test_a_gpu_has_the_logits_of_more_tokens_at_one_time(device: str, chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(2049, 4, generator=generator), torch.randn(9, 4, generator=generator)
    hidden.requires_grad_()
    targets = torch.randint(0, 9, (2049,), generator=generator)
    expected = (hidden @ weight.T).log_softmax(-1)[torch.arange(2049), targets]
    with planning(device):
        for found in (
            token_logprobs(hidden, Head(weight), targets),
            frozen_logprobs(hidden, weight, targets),
        ):
            torch.testing.assert_close(found, expected)
            (gradient,) = torch.autograd.grad(found.sum(), hidden, retain_graph=True)
            torch.testing.assert_close(
                gradient, torch.autograd.grad(expected.sum(), hidden, retain_graph=True)[0]
            )
        kept = token_logprobs(hidden, Head(weight), targets).grad_fn.kept  # type: ignore[union-attr]
    assert list(kept) == list(range(0, 2049, chunk))


def test_however_many_models_share_a_row_few_logits_wait_for_backward(
    make_worker: MakeWorker, untied_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those that are computed again give the same gradients, to the last bit."""
    specs = {ModelKey(number): LoraSpec(4, number) for number in (1, 2, 3)}
    items = [make_item(key, make_data((40,), key)) for key in specs]
    gradients = []
    for limit, expected in ((network.KEPT_OF_ROW, 3), (2 * 40 * VOCAB, 2), (0, 0)):
        monkeypatch.setattr(network, "KEPT_OF_ROW", limit)
        worker = make_worker(untied_model)
        for key, spec in specs.items():
            worker.create_model(key, spec)
        adapters = tuple((Span(40 * n, 40 * n + 40, key), worker._models[key]) for n, key in enumerate(specs))
        row = make_row(build_batch(items), (0, 1, 2), torch.device("cpu"))
        parts = worker._base(row, adapters).grad_fn.next_functions  # type: ignore[union-attr]
        assert sum(len(part.kept) for part, _ in parts) == expected  # type: ignore[union-attr]
        run_pass(worker, *items)
        gradients.append(gradients_of(worker, 2))
    assert_equal(gradients[1], gradients[0])
    assert_equal(gradients[2], gradients[0])


@pytest.mark.parametrize("candidates", [1, 3])
@pytest.mark.parametrize("vocab", [90, 2501])
def test_logprobs_made_in_one_go_are_those_made_apart_to_the_bit(vocab: int, candidates: int) -> None:
    """Some of so few tokens that BLAS multiplies them in an order of its own; the first without gradient."""
    generator = torch.Generator().manual_seed(0)
    lengths = [2, 3, 8, 40, 5]
    weight = torch.randn(vocab, 48, generator=generator)
    hidden = torch.randn(sum(lengths), 48, generator=generator).requires_grad_()
    tokens = torch.arange(sum(lengths)).repeat_interleave(candidates)
    targets = torch.randint(0, vocab, (len(tokens),), generator=generator)
    upstream = torch.randn(len(tokens), generator=generator)
    upstream[tokens < lengths[0]] = 0.0
    where = None if candidates == 1 else tokens
    together = token_logprobs(hidden, Head(weight), targets, where, cuts=lengths)
    parts, start = [], 0
    for length in lengths:
        own = (tokens >= start) & (tokens < start + length)
        of_own = None if where is None else where[own] - start
        parts.append(token_logprobs(hidden[start : start + length], Head(weight), targets[own], of_own))
        start += length
    apart = torch.cat(parts)
    assert torch.equal(together, apart)
    (found,) = torch.autograd.grad(together, hidden, upstream)
    (expected,) = torch.autograd.grad(apart, hidden, upstream)
    assert torch.equal(found, expected)


def test_a_frozen_head_needs_no_logits_in_backward() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(600, 16, generator=generator).requires_grad_()
    weight = torch.randn(90, 16, generator=generator)
    targets = torch.randint(0, 90, (600,), generator=generator)
    upstream = torch.randn(600, generator=generator)
    expected = (hidden @ weight.T).log_softmax(-1)[torch.arange(600), targets]
    found = frozen_logprobs(hidden, weight, targets)
    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad(found, hidden, upstream)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, hidden, upstream)[0])


@pytest.fixture(scope="module")
def large_head() -> torch.Tensor:
    """Head weight [V, D] with the vocabulary of Qwen3, exact in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(151_936, 64, generator=generator).div(8).bfloat16()


@pytest.mark.parametrize("path", ["frozen", "token", "adapted"])
@pytest.mark.parametrize("probability", [0.3, 0.9, 0.99, 0.999])
def test_in_bfloat16_a_confident_token_keeps_its_gradient(
    path: str, probability: float, large_head: torch.Tensor
) -> None:
    """Against float64; the activations are exact in bfloat16."""
    vocab, count = len(large_head), 8
    wide_head = large_head.double()
    targets = torch.arange(1000, 1000 + count)
    hidden = torch.stack([_confident(wide_head, int(target), probability) for target in targets])
    upstream = torch.linspace(-2, 2, count).bfloat16().float()
    wide = hidden.double().requires_grad_()
    expected = (wide @ wide_head.T).log_softmax(-1)[torch.arange(count), targets]
    torch.testing.assert_close(expected.exp(), torch.full_like(expected, probability), rtol=0, atol=0.05)
    hidden.requires_grad_()
    if path == "frozen":
        found = frozen_logprobs(hidden, large_head, targets)
    elif path == "token":
        found = token_logprobs(hidden, Head(large_head), targets)
    else:
        inner, outer = (torch.zeros(rows, 8, dtype=torch.bfloat16) for rows in (count, vocab))
        found = token_logprobs(hidden, Head(large_head, inner, outer), targets)
    torch.testing.assert_close(found, expected.float(), rtol=0, atol=1e-4)
    (gradient,) = torch.autograd.grad(found, hidden, upstream)
    (reference,) = torch.autograd.grad(expected, wide, upstream.double())
    errors = (gradient.double() - reference).norm(dim=-1) / reference.norm(dim=-1)
    assert errors.max() < 0.01


def _confident(head: torch.Tensor, target: int, probability: float) -> torch.Tensor:
    """Activation along the target's own row, exact in bfloat16, that gives it this probability."""
    logits = head @ head[target]  # per unit of length
    low, high = 0.0, 100.0
    for _ in range(12):
        middle = (low + high) / 2
        if float((middle * logits).softmax(-1)[target]) < probability:
            low = middle
        else:
            high = middle
    return (high * head[target]).bfloat16()


@pytest.mark.parametrize("weight", [1.0, 0.0], ids=["dense", "sparse"])
def test_a_large_frozen_head_gives_the_reference_gradients(
    weight: float, monkeypatch: pytest.MonkeyPatch, make_worker: MakeWorker, untied_model: str
) -> None:
    """Logprobs are computed differently where most targets have a weight than where few have."""
    monkeypatch.setattr(logprobs, "KEPT", 0)
    worker = make_worker(untied_model, models={1: LoraSpec(8, 1, train_unembed=False)})
    data = make_data(LENGTHS, 1)
    for datum in data:
        datum.inputs["weights"][::2] = weight
        datum.inputs["weights"][1::4] = weight
    run_one(worker, make_item(1, data))
    _, gradients = reference.adapter_gradients(
        untied_model, weights_of(worker, 1), data, reference.cross_entropy
    )
    assert_close(gradients_of(worker, 1), gradients, 1e-5)

import numpy as np
import pytest
import torch

from skyrl_tinker.training import logprobs
from skyrl_tinker.training.logprobs import Head, token_logprobs
from skyrl_tinker.wire.ids import ModelKey
from skyrl_tinker.wire.values import Datum, LoraSpec
from tests.training import reference
from tests.training.conftest import MakeWorker
from tests.training.passes import make_data, make_item, perturb, run_one, weights_of

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
    worker = make_worker(model_directory)
    worker.create_model(ModelKey(1), LoraSpec(8, 0))
    perturb(worker, 1)
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
    upstream[(256 <= tokens) & (tokens < 512)] = 0.0  # a whole chunk without gradient
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

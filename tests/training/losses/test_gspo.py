import torch

from tests.training.losses.support.cases import datums_of, make, run
from tests.training.losses.support.naive import Request


def with_inputs(request: Request, **inputs: list[float]) -> Request:
    return Request({**request.inputs, **inputs}, request.shapes, request.config, request.seed)


def test_a_datum_whose_mask_is_all_zero_has_ratio_one() -> None:
    logprobs, request = make("gspo")
    mask = [0.0] * len(logprobs)
    values, gradient, _ = run("gspo", logprobs, with_inputs(request, sequence_ratio_mask=mask))
    plain = -torch.tensor(request.inputs["advantages"])
    assert torch.equal(values, plain.double())
    assert torch.equal(gradient, plain.double())


def test_tokens_outside_the_mask_do_not_move_the_ratio() -> None:
    logprobs, request = make("gspo", {"clip_low_threshold": 0.0, "clip_high_threshold": 1e6})
    mask = request.inputs["sequence_ratio_mask"]
    moved = [q if counted else q - 7.0 for q, counted in zip(request.inputs["logprobs"], mask, strict=True)]
    values, gradient, _ = run("gspo", logprobs, request)
    others, other_gradient, _ = run("gspo", logprobs, with_inputs(request, logprobs=moved))
    assert torch.equal(values, others)
    assert torch.equal(gradient, other_gradient)


def test_all_tokens_of_a_datum_have_one_ratio() -> None:
    logprobs, request = make("gspo", {"clip_low_threshold": 0.0, "clip_high_threshold": 1e6})
    ones = [1.0] * len(logprobs)
    request = with_inputs(request, advantages=ones, sequence_ratio_mask=ones)
    values, _, _ = run("gspo", logprobs, request)
    ratios = [set(values[part].tolist()) for part, _ in datums_of(request)]
    assert all(len(found) == 1 for found in ratios)
    assert len(set.union(*ratios)) == len(ratios)

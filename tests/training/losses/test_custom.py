"""Uploaded losses give what the client's own function gives in eager torch: values, gradients, metrics."""

import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from skyrl_tinker.errors import UserError
from skyrl_tinker.training.losses.custom import custom
from tests.training.losses.support.uploads import Function, Inputs, compute, context, draw, upload

Result = tuple[torch.Tensor, Mapping[str, torch.Tensor]]


def negative_likelihood(logprobs: torch.Tensor, weights: torch.Tensor) -> Result:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/nll:sum": loss, "custom/half:mean": loss / 2}


def clipped_policy(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> Result:
    ratio = torch.exp(logprobs - old)
    kept = torch.clamp(ratio, 0.8, 1.2)
    loss = -torch.minimum(ratio * advantages, kept * advantages).sum()
    return loss, {"custom/clipped:mean": (ratio != kept).float().mean()}


def masked_squares(logprobs: torch.Tensor, old: torch.Tensor) -> Result:
    chosen = logprobs[(old > 0) & ~(logprobs < -1.5)]
    return chosen.pow(2).sum(), {"custom/count:sum": (old > 0).sum()}


def running_sums(logprobs: torch.Tensor, scale: torch.Tensor) -> Result:
    decay = 0.9 ** torch.arange(logprobs.shape[0])
    return (torch.cumsum(logprobs, 0) * decay).mean() * scale, {}


def soft_best(logprobs: torch.Tensor) -> Result:
    chances = F.softmax(logprobs, dim=-1)
    loss = -torch.logsumexp(logprobs, -1) + (chances * F.log_softmax(logprobs, dim=-1)).sum()
    return loss, {"custom/top:sum": torch.sort(chances, descending=True)[0][:3].sum()}


def contrast(logprobs: torch.Tensor, old: torch.Tensor) -> Result:
    margin = logprobs.sum() - old.sum().detach()
    return -F.logsigmoid(0.1 * margin), {"custom/margin:mean": margin, "custom/right:sum": margin > 0}


def smooth(logprobs: torch.Tensor, old: torch.Tensor) -> Result:
    loss = F.huber_loss(logprobs, old, reduction="sum", delta=0.5) + F.softplus(logprobs).sum()
    return loss + F.mse_loss(logprobs, old) + F.relu(old - logprobs).sum(), {}


def picked_candidates(logprobs: torch.Tensor, picks: torch.Tensor, rewards: torch.Tensor) -> Result:
    rows = torch.arange(logprobs.shape[0])
    best = logprobs.max(dim=-1).values
    picked = logprobs[rows, picks]
    same = logprobs.gather(1, picks[:, None]).squeeze(-1)
    loss = -(picked * rewards).sum() + 0.1 * (best - same).square().sum()
    return loss, {"custom/k:mean": logprobs.mean() * 0 + logprobs.shape[1]}


def distilled(logprobs: torch.Tensor, teacher: torch.Tensor) -> Result:
    chances = teacher.softmax(-1)
    divergence = torch.where(chances > 0.05, chances * (chances.log() - logprobs), torch.zeros_like(logprobs))
    return divergence.sum(), {"custom/entropy:mean": -(chances * chances.log()).sum(-1).mean()}


def shaped(logprobs: torch.Tensor, old: torch.Tensor) -> Result:
    both = torch.stack([logprobs, old], dim=1).reshape(-1, 2).T
    pairs = both[0][:, None] - both[1][None, :]
    shifted = torch.cat([logprobs.new_zeros(1), logprobs[:-1]])
    gap = (pairs.tril() / math.sqrt(2) + shifted.expand(logprobs.shape[0], -1)).flip(0)
    return gap.mean(dim=(0, 1)), {"custom/least:sum": gap.amin(), "custom/most:sum": gap.flatten().topk(1)[0]}


def in_double(logprobs: torch.Tensor, old: torch.Tensor) -> Result:
    ratio = (logprobs.double() - old.to(torch.float64)).clamp(min=-5, max=float("inf"))
    return (ratio.exp() - 1 - ratio).sum(axis=0), {"custom/bad:sum": ratio.isnan().any().long()}


def normalised(logprobs: torch.Tensor, lengths: torch.Tensor) -> Result:
    centred = (logprobs - logprobs.mean()) / (logprobs.std() + 1e-6)
    return (centred.sigmoid().log() * lengths.to(logprobs.dtype)).sum() / logprobs.numel(), {}


def unconcerned(logprobs: torch.Tensor, old: torch.Tensor) -> Result:
    return old.sum() + logprobs.detach().sum(), {}


SHAPES = ((7,), (1,), (12,))
FLAT: dict[str, tuple[Function, Inputs]] = {
    "negative_likelihood": (negative_likelihood, {"weights": draw(12, seed=1)}),
    "clipped_policy": (clipped_policy, {"old": draw(12, seed=2), "advantages": draw(12, seed=3)}),
    "masked_squares": (masked_squares, {"old": draw(12, seed=4)}),
    "running_sums": (running_sums, {"scale": torch.tensor(3)}),
    "soft_best": (soft_best, {}),
    "contrast": (contrast, {"old": draw(12, seed=5)}),
    "smooth": (smooth, {"old": draw(12, seed=6)}),
    "shaped": (shaped, {"old": draw(12, seed=7)}),
    "in_double": (in_double, {"old": draw(12, seed=8)}),
    "unconcerned": (unconcerned, {"old": draw(12, seed=9)}),
}
CANDIDATES: dict[str, tuple[Function, Inputs]] = {
    "picked_candidates": (
        picked_candidates,
        {"picks": torch.tensor([0, 2, 1, 1, 0, 2, 2, 1, 0, 0, 1, 2]), "rewards": draw(12, seed=1)},
    ),
    "distilled": (distilled, {"teacher": draw(12, 3, seed=2)}),
    "normalised": (normalised, {"lengths": torch.tensor(4)}),
}


def cut(inputs: Inputs, length: int) -> Inputs:
    return {name: values[:length] if values.ndim else values for name, values in inputs.items()}


def assert_as_in_eager(function: Function, inputs: Inputs, shapes: tuple[tuple[int, ...], ...]) -> None:
    data = [(draw(*shape) - 1, cut(inputs, shape[0])) for shape in shapes]
    ranks = {"logprobs": len(shapes[0]), **{name: values.ndim for name, values in inputs.items()}}
    terms, gradients = compute(upload(function, **ranks), data)
    sums: dict[str, float] = {}
    for (logprobs, own), value, part in zip(
        data, terms.values, gradients.split([logprobs.numel() for logprobs, _ in data]), strict=True
    ):
        leaf = logprobs.clone().requires_grad_()
        loss, metrics = function(leaf, *own.values())
        expected = torch.autograd.grad(loss, leaf)[0] if loss.requires_grad else torch.zeros_like(leaf)
        torch.testing.assert_close(value, loss.detach().float(), rtol=0, atol=0)
        torch.testing.assert_close(part, expected.flatten(), rtol=0, atol=0)
        for key, metric in metrics.items():
            sums[key] = sums.get(key, 0.0) + float(metric.detach())
    assert {key: float(value) for key, value in terms.metrics.items()} == pytest.approx(sums)


@pytest.mark.parametrize("case", FLAT)
def test_losses_of_one_target_per_position_are_those_of_eager_torch(case: str) -> None:
    assert_as_in_eager(*FLAT[case], SHAPES)


@pytest.mark.parametrize("case", CANDIDATES)
def test_losses_of_several_candidates_are_those_of_eager_torch(case: str) -> None:
    assert_as_in_eager(*CANDIDATES[case], ((7, 3), (1, 3), (12, 3)))


def test_a_datum_alone_and_among_others_is_the_same() -> None:
    loss = upload(contrast, logprobs=1, old=1)
    data = [(draw(size, seed=size), {"old": draw(size)}) for size in (3, 9, 5)]
    terms, gradients = compute(loss, data)
    alone = [compute(loss, [each]) for each in data]
    assert terms.values.tolist() == [value for other, _ in alone for value in other.values.tolist()]
    np.testing.assert_array_equal(gradients, torch.cat([part for _, part in alone]))


def test_upstream_gradients_are_scaled_per_datum() -> None:
    data = [(draw(size, seed=size), {"old": draw(size)}) for size in (3, 4)]
    loss = upload(contrast, logprobs=1, old=1)
    _, plain = compute(loss, data)
    flat = torch.cat([logprobs for logprobs, _ in data]).requires_grad_()
    (custom(flat, context(loss, data)).values * torch.tensor([2.0, 3.0])).sum().backward()
    torch.testing.assert_close(flat.grad, plain * torch.tensor([2.0] * 3 + [3.0] * 4))


def test_without_gradients_there_are_none() -> None:
    data = [(draw(4), {"weights": draw(4, seed=1)})]
    with torch.no_grad():
        terms = custom(data[0][0], context(upload(negative_likelihood, logprobs=1, weights=1), data))
    assert not terms.values.requires_grad
    assert float(terms.values) == pytest.approx(-float((data[0][0] * data[0][1]["weights"]).sum()))


def test_an_input_of_the_name_logprobs_is_not_mistaken_for_the_policy_s() -> None:
    """Data for RL carry the sampler's logprobs under that name; a loss cannot take both."""
    data = [(draw(4), {"logprobs": torch.zeros(4)})]
    terms, _ = compute(upload(soft_best, logprobs=1), data)
    assert float(terms.values) == pytest.approx(float(soft_best(data[0][0])[0]))


WRONG_DATA: dict[str, tuple[Inputs, str]] = {
    "missing input": ({"x": draw(4)}, r"loss_fn_inputs lacks 'weights', found \['x'\]"),
    "another rank": ({"weights": torch.tensor(1.0)}, "weights has rank 0, expected 1"),
    "lengths that do not fit": ({"weights": draw(3)}, r"node 'mul' \(operator.mul\): .*size"),
}


@pytest.mark.parametrize("case", WRONG_DATA)
def test_data_that_do_not_fit_are_named(case: str) -> None:
    own, message = WRONG_DATA[case]
    loss = upload(negative_likelihood, logprobs=1, weights=1)
    with pytest.raises(UserError, match=rf"custom loss 'negative_likelihood', .*\(4,\): {message}"):
        compute(loss, [(draw(4), own)])


def test_targets_of_another_rank_are_refused() -> None:
    with pytest.raises(UserError, match="logprobs has rank 2, expected 1"):
        compute(upload(negative_likelihood, logprobs=1, weights=1), [(draw(4, 2), {"weights": draw(4)})])

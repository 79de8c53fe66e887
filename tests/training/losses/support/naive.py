"""Every loss as its definition reads, token by token in plain Python: no torch but for one seeded draw.

A definition takes `now`, the logprobs, and `then`, the logprobs at which what stands under a stop_gradient
(or selects tokens) was computed. Its value has now = then; its gradient is that in `now` alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import exp, prod

import torch


@dataclass(frozen=True)
class Request:
    inputs: Mapping[str, list[float]]
    shapes: tuple[tuple[int, ...], ...]
    config: Mapping[str, float]
    seed: int = 0


Floats = Sequence[float]
Naive = Callable[[Floats, Floats, Request], list[float]]


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def per_token(term: Callable[..., float]) -> Naive:
    """Build a loss from term(p, p_then, config, **inputs of the token)."""

    def loss(now: Floats, then: Floats, request: Request) -> list[float]:
        tokens = [
            dict(zip(request.inputs, row, strict=True)) for row in zip(*request.inputs.values(), strict=True)
        ]
        return [term(p, old, request.config, **x) for p, old, x in zip(now, then, tokens, strict=True)]

    return loss


def cross_entropy(p: float, old: float, c: Mapping[str, float], *, weights: float) -> float:
    return -weights * p


def importance_sampling(
    p: float, old: float, c: Mapping[str, float], *, logprobs: float, advantages: float
) -> float:
    return -exp(p - logprobs) * advantages


def ppo(p: float, old: float, c: Mapping[str, float], *, logprobs: float, advantages: float) -> float:
    r = exp(p - logprobs)
    kept = clip(r, c["clip_low_threshold"], c["clip_high_threshold"])
    return -min(r * advantages, kept * advantages)


def cispo(p: float, old: float, c: Mapping[str, float], *, logprobs: float, advantages: float) -> float:
    return -clip(exp(old - logprobs), c["clip_low_threshold"], c["clip_high_threshold"]) * p * advantages


def dro(p: float, old: float, c: Mapping[str, float], *, logprobs: float, advantages: float) -> float:
    return -(p * advantages - 0.5 * c["beta"] * (p - logprobs) ** 2)


def regular(p: float, old: float, c: Mapping[str, float], *, logprobs: float, advantages: float) -> float:
    r = exp(p - logprobs)
    return -min(r * advantages, clip(r, 1 - c["eps_low"], 1 + c["eps_high"]) * advantages)


def dual_clip(p: float, old: float, c: Mapping[str, float], *, logprobs: float, advantages: float) -> float:
    loss = regular(p, old, c, logprobs=logprobs, advantages=advantages)
    return min(loss, -c["clip_ratio_c"] * advantages) if advantages < 0 else loss


def sapo(p: float, old: float, c: Mapping[str, float], *, logprobs: float, advantages: float) -> float:
    tau = c["tau_pos"] if advantages > 0 else c["tau_neg"]
    x = tau * (exp(p - logprobs) - 1)
    return -4 / tau * (1 / (1 + exp(-x)) if x > -700 else 0.0) * advantages


def stable_reinforce(
    p: float,
    old: float,
    c: Mapping[str, float],
    *,
    advantages: float,
    sampling_logprobs: float,
    sampled: float,
) -> float:
    r = exp(old - sampling_logprobs)
    if not sampled or not c["mask_low"] <= r <= c["mask_high"]:
        return 0.0
    penalty = c["kl_coeff"] * 0.5 * (p - sampling_logprobs) ** 2
    return -min(r, c["ratio_cap"]) * advantages * p + penalty


def gspo(now: Floats, then: Floats, request: Request) -> list[float]:
    low, high = request.config["clip_low_threshold"], request.config["clip_high_threshold"]
    q, advantages, mask = (request.inputs[name] for name in ("logprobs", "advantages", "sequence_ratio_mask"))
    values = []
    for start, stop in pairwise(accumulate((prod(shape) for shape in request.shapes), initial=0)):
        counted = [then[i] - q[i] for i in range(start, stop) if mask[i]]
        s = exp(sum(counted) / len(counted)) if counted else 1.0
        for i in range(start, stop):
            r = s * exp(now[i] - then[i])
            values.append(-min(r * advantages[i], clip(r, low, high) * advantages[i]))
    return values


def covariances(p: Floats, advantages: Floats) -> dict[int, float]:
    counted = [i for i, a in enumerate(advantages) if a]
    mean_a = sum(advantages[i] for i in counted) / len(counted)
    mean_p = sum(p[i] for i in counted) / len(counted)
    return {i: (advantages[i] - mean_a) * (p[i] - mean_p) for i in counted}


def clip_cov(now: Floats, then: Floats, request: Request) -> list[float]:
    c, q, advantages = request.config, request.inputs["logprobs"], request.inputs["advantages"]
    candidates = [
        i
        for i, covariance in sorted(covariances(then, advantages).items())
        if c["clip_cov_lb"] < covariance < c["clip_cov_ub"]
        and not is_clipped(then[i] - q[i], advantages[i], c)
    ]
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(request.seed)).tolist()
    count = int(c["clip_cov_ratio"] * sum(a != 0 for a in advantages))
    dropped = {candidates[i] for i in order[: max(1, count)]}
    plain = per_token(regular)(now, then, request)
    return [0.0 if i in dropped else value for i, value in enumerate(plain)]


def is_clipped(log_ratio: float, advantage: float, c: Mapping[str, float]) -> bool:
    r = exp(log_ratio)
    return r > 1 + c["eps_high"] if advantage > 0 else r < 1 - c["eps_low"]


def kl_cov(now: Floats, then: Floats, request: Request) -> list[float]:
    c, q, advantages = request.config, request.inputs["logprobs"], request.inputs["advantages"]
    ranked = sorted(covariances(then, advantages).items(), key=lambda pair: -pair[1])
    chosen = {i for i, _ in ranked[: max(1, int(c["kl_cov_ratio"] * len(ranked)))]}
    plain = per_token(importance_sampling)(now, then, request)
    return [
        value + (c["ppo_kl_coef"] * abs(now[i] - q[i]) if i in chosen else 0.0)
        for i, value in enumerate(plain)
    ]


LOSSES: dict[str, Naive] = {
    term.__name__: per_token(term)
    for term in (
        cross_entropy,
        importance_sampling,
        ppo,
        cispo,
        dro,
        regular,
        dual_clip,
        sapo,
        stable_reinforce,
    )
} | {"gspo": gspo, "clip_cov": clip_cov, "kl_cov": kl_cov}

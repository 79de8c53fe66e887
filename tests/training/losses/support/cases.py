"""Requests of several datums with both signs of advantage, zeros, and ratios far out of every range."""

from collections.abc import Mapping
from itertools import accumulate, pairwise
from math import prod

import numpy as np
import torch

from skyrl_tinker.domain.loss_specs import LOSSES
from skyrl_tinker.training.losses import LOSS_FUNCTIONS, LossContext
from tests.training.losses.support import naive

SHAPES = ((5,), (1,), (17,), (9,), (8,))

CONFIGS: dict[str, tuple[Mapping[str, float], ...]] = {
    "cross_entropy": ({},),
    "importance_sampling": ({},),
    "ppo": (
        {},
        {"clip_low_threshold": 0.3, "clip_high_threshold": 0.9},
        {"clip_low_threshold": 1.1, "clip_high_threshold": 1e6},
    ),
    "cispo": ({}, {"clip_low_threshold": 0.3, "clip_high_threshold": 0.9}),
    "dro": ({}, {"beta": 3.0}, {"beta": 0.0}),
    "gspo": (
        {},
        {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0},
        {"clip_low_threshold": 0.0, "clip_high_threshold": 1e6},
    ),
    "stable_reinforce": (
        {},
        {"kl_coeff": 0.0, "ratio_cap": 1.0, "mask_low": 0.0, "mask_high": 1e6},
        {"kl_coeff": 2.0, "ratio_cap": 1.5, "mask_low": 0.1, "mask_high": 30.0},
    ),
    "regular": ({}, {"eps_low": 0.5, "eps_high": 0.1}),
    "dual_clip": ({}, {"eps_low": 0.1, "eps_high": 0.28, "clip_ratio_c": 1.5}),
    "sapo": ({}, {"tau_pos": 0.3, "tau_neg": 4.0}),
    "clip_cov": (
        {},
        {"clip_cov_ratio": 0.3, "clip_cov_lb": -2.0, "clip_cov_ub": 3.0},
        {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.5, "eps_low": 0.9, "eps_high": 4.0},
    ),
    "kl_cov": ({}, {"kl_cov_ratio": 0.3, "ppo_kl_coef": 0.1}, {"kl_cov_ratio": 1.0}),
}
"""By loss: the config keys to try, defaults first."""

CASES = [(name, config) for name, configs in CONFIGS.items() for config in configs]
NAMES = tuple(CONFIGS)


def filled(name: str, config: Mapping[str, float]) -> dict[str, float]:
    return {key: known.default for key, known in LOSSES[name].config.items()} | dict(config)


def make(
    name: str, config: Mapping[str, float] | None = None, seed: int = 0
) -> tuple[torch.Tensor, naive.Request]:
    """Logprobs [n] float64 and what goes with them. Log ratios reach from -15 to 15."""
    rng = np.random.default_rng(seed)
    shapes = tuple((*shape, 3) for shape in SHAPES) if LOSSES[name].candidates else SHAPES
    count = sum(prod(shape) for shape in shapes)
    logprobs = rng.uniform(-20.0, -16.0, count)
    log_ratio = rng.normal(0.0, 0.3, count)
    log_ratio[rng.permutation(count)[:10]] = (-15, -8, -3, -1, 1, 2, 3, 8, 12, 15)
    sampling = logprobs - log_ratio
    arrays = {
        "weights": rng.integers(-1, 3, count) * 0.5,
        "advantages": rng.integers(-2, 3, count) * 0.75,
        "logprobs": sampling,
        "sampling_logprobs": sampling,
        "sampled": rng.integers(0, 4, count) > 0,
        "sequence_ratio_mask": (rng.integers(0, 3, count) > 0) * 0.5,
    }
    arrays["sequence_ratio_mask"][:5] = 0.0  # none of the first datum
    spec = LOSSES[name]
    inputs = {
        key: arrays[key].astype(float).tolist() for key in (*spec.inputs, *spec.optional, *spec.recorded)
    }
    return torch.from_numpy(logprobs), naive.Request(inputs, shapes, filled(name, config or {}), seed)


def context_of(request: naive.Request, dtype: torch.dtype = torch.float64) -> LossContext:
    inputs = {name: torch.tensor(values, dtype=dtype) for name, values in request.inputs.items()}
    return LossContext(inputs, request.shapes, request.config, request.seed)


def run(
    name: str, logprobs: torch.Tensor, request: naive.Request
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Values [n], their sum's gradient [n], metrics."""
    leaf = logprobs.clone().requires_grad_()
    terms = LOSS_FUNCTIONS[name](leaf, context_of(request, leaf.dtype))
    (gradient,) = torch.autograd.grad(terms.values.sum(), leaf)
    return terms.values.detach(), gradient, {key: float(value) for key, value in terms.metrics.items()}


def datums_of(request: naive.Request) -> list[tuple[slice, naive.Request]]:
    """Each datum as a request of its own."""
    bounds = pairwise(accumulate((prod(shape) for shape in request.shapes), initial=0))
    parts = []
    for (start, stop), shape in zip(bounds, request.shapes, strict=True):
        inputs = {name: values[start:stop] for name, values in request.inputs.items()}
        parts.append((slice(start, stop), naive.Request(inputs, (shape,), request.config, request.seed)))
    return parts

"""Dimuon, version 1: Muon for adapters, as defined here.

The hosted Dimuon is not published. Known are its parameters and, from the SDK's documentation, that the
learning rate applies "to a direction with Frobenius norm sqrt(rank)" which a "matrix sign" gives. Muon
(Jordan et al. 2024, kellerjordan.github.io/posts/muon) without its factor for the shape does that, so:

    M <- beta1 M + (1 - beta1) G          an average of the (clipped) gradients, without bias correction
    W <- W - learning_rate * sign(M)      for each matrix W separately; no weight decay

sign(M) = U V^T of M = U S V^T, by five Newton-Schulz steps with Jordan's coefficients, in float32; they leave
singular values of about 1 (0.7 to 1.2). Each A [r, in] and each B [out, r] of an adapter is a separate
matrix, whose sign has a Frobenius norm of about sqrt(r). The hosted one also preconditions rows and columns
and corrects the learning rate for ranks other than 32; how is not published, and neither is done here.

Full-parameter training follows the same rule, with each parameter taken as the linear map that it is
(arXiv:2410.21265 dualises layers by their role): an embedding is one row per token, any vector is one row,
and the sign of a row is that row at unit length. So all entries of the model move by about
learning_rate / sqrt(features). Embedding rows without gradient in a step stay, as in torch.optim.SparseAdam.
An untied head is a matrix.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch

from skyrl_tinker.domain.values import DimuonParams
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.models.trainable_model import Kind, Part, TrainableModel
from skyrl_tinker.training.optimizers.float_range import LARGEST, Bounds, doubtful_parts

_STEPS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315
_TINY = 1e-12
"""Norms below this are not scaled up to unit length: zero stays zero."""
_LONGEST = 2.0
"""No entry of a direction is larger: its singular values are at most 1.3."""
_BATCH = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Most entries of matrices that are multiplied at once, to fit a CPU's cache; a single one may have more."""


def reserve(model: TrainableModel, ranks: Ranks) -> None:
    """Allocate and free the memory of a step's largest batch, so that a shortage shows before the step.

    It holds the matrices, four tensors of at most their size in `matrix_sign`, and the signs of all ranks.
    """
    shapes = {name: shape for name, shape in model.shapes().items() if model.kind(name) is Kind.MATRIX}
    dealt = 0 if model.network_key is None else ranks.world
    batches = _batches(shapes, _BATCH[ranks.device.type], max(1, dealt))
    largest = max(len(names) * prod(shapes[names[0]]) for names in batches)
    model.local(Part.WEIGHT)[0].new_empty((5 + dealt) * largest)


def apply(
    model: TrainableModel, gradients: list[torch.Tensor], norm: float, params: DimuonParams, ranks: Ranks
) -> list[Part]:
    """Update the weights by this rank's gradients, summed over ranks and clipped to the global `norm`.

    Changes nothing where values would leave float32's range: returns the parts that would. Every rank must
    call it.
    """
    if doubtful := doubtful_parts(model, lambda bounds: _bounds_after(bounds, norm, params), ranks):
        return doubtful
    weights, momenta = model.local(Part.WEIGHT), model.local(Part.MOMENTUM)
    torch._foreach_lerp_(momenta, gradients, 1 - params.beta1)

    def add(name: str, direction: torch.Tensor) -> None:
        model.select(name, weights).add_(direction, alpha=-params.learning_rate)

    matrices: dict[str, tuple[int, ...]] = {}
    for name, shape in model.shapes().items():
        momentum = model.select(name, momenta)
        match model.kind(name):
            case Kind.TABLE:  # sharded by rows
                add(name, _rows(momentum, model.select(name, gradients)))
            case Kind.VECTOR:
                add(name, model.shard(name, _unit(model.gather(name, momentum))))
            case Kind.MATRIX:
                matrices[name] = shape
    for name, sign in _signs(model, matrices, momenta, ranks):
        add(name, sign)
    return []


def _bounds_after(bounds: Bounds, norm: float, params: DimuonParams) -> Bounds:
    """Return bounds after a step: of weights' entries, and of the momentum's norm, whose square is taken."""
    momentum = max(bounds[Part.MOMENTUM], norm)
    return {
        Part.WEIGHT: bounds[Part.WEIGHT] + _LONGEST * params.learning_rate,
        Part.MOMENTUM: momentum if momentum * momentum <= LARGEST else math.inf,
    }


def _signs(
    model: TrainableModel, shapes: Mapping[str, tuple[int, ...]], momenta: list[torch.Tensor], ranks: Ranks
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this rank's share of each matrix's sign."""
    if model.network_key is None:  # whole on every rank, and small
        for names in _batches(shapes, _BATCH[ranks.device.type]):
            whole = torch.stack([model.select(name, momenta) for name in names])
            yield from zip(names, matrix_sign(whole), strict=True)
    else:
        for name, sign in _deal_signs(model, shapes, momenta, ranks):
            yield name, model.shard(name, sign)


def _deal_signs(
    model: TrainableModel, shapes: Mapping[str, tuple[int, ...]], momenta: list[torch.Tensor], ranks: Ranks
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each matrix's sign, which one rank has computed for all.

    Each rank takes one of as many batches as there are ranks, of about as much work.
    """
    batches = _batches(shapes, _BATCH[ranks.device.type], ranks.world)
    for first in range(0, len(batches), ranks.world):
        dealt = batches[first : first + ranks.world]
        signs = [_gather(model, names, momenta, owner == ranks.rank) for owner, names in enumerate(dealt)]
        if ranks.rank < len(dealt):
            signs[ranks.rank] = matrix_sign(signs[ranks.rank]).contiguous()
        for owner, names in enumerate(dealt):
            ranks.broadcast_(signs[owner], owner)
            yield from zip(names, signs[owner], strict=True)


def _gather(
    model: TrainableModel, names: Sequence[str], momenta: list[torch.Tensor], mine: bool
) -> torch.Tensor:
    """Return whole matrices, stacked, or only memory for them. Every rank must call it."""
    stacked = None
    for number, name in enumerate(names):
        whole = model.gather(name, model.select(name, momenta))
        if stacked is None:
            stacked = whole.new_empty(len(names), *whole.shape)
        if mine:
            stacked[number] = whole
    assert stacked is not None, "no batch is empty"
    return stacked


def _batches(shapes: Mapping[str, tuple[int, ...]], most: int, ranks: int = 1) -> list[list[str]]:
    """Put matrices of one shape together, those of most work first: experts have hundreds of small ones.

    A batch has at most `most` entries; where there are enough matrices, each rank gets some of them.
    """
    alike: dict[tuple[int, ...], list[str]] = {}
    for name in sorted(shapes, key=lambda name: -prod(shapes[name]) * min(shapes[name])):
        alike.setdefault(shapes[name], []).append(name)
    batches = []
    for shape, names in alike.items():
        size = max(1, min(most // prod(shape), len(names) // ranks))
        batches += [names[first : first + size] for first in range(0, len(names), size)]
    return batches


def matrix_sign(matrices: torch.Tensor) -> torch.Tensor:
    """Approximate U V^T of each matrix U S V^T of [N, m, n]; zero for a zero matrix.

    x <- a x + b (x x^T) x + c (x x^T)^2 x maps every singular value s to a s + b s^3 + c s^5; the matrix is
    scaled to norm 1 first, where this iteration leads them to about 1.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_TINY)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if tall else x


def _unit(tensor: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(tensor)
    return tensor / norm.clamp(min=_TINY)


def _rows(momentum: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Scale each row to unit length, or to zero where the gradient's row is zero; both [tokens, features]."""
    lengths: torch.Tensor = torch.linalg.vector_norm(momentum, dim=1, keepdim=True)
    return (momentum / lengths.clamp(min=_TINY)).mul_(gradient.any(dim=1, keepdim=True))

"""FlashAttention 3 and 4 as kernels under torch's varlen_attn, in place of FlashAttention 2."""

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import attention

from skyrl_tinker.system.packages import is_installed
from skyrl_tinker.training.batching.packed_row import Segments
from skyrl_tinker.training.models.fused.kernel_trial import fault_of

_log = logging.getLogger(__name__)
_LENGTHS, _WINDOW = (1, 70, 200), 50


class _Package(NamedTuple):
    name: str  # as torch calls it
    module: str
    capabilities: tuple[int, ...]  # major ones of the GPUs that torch lets it run on


_PACKAGES = (_Package("FA3", "flash_attn_interface", (9,)), _Package("FA4", "flash_attn.cute", (9, 10)))
_Kernel = Callable[..., torch.Tensor]


class HeadShape(NamedTuple):
    """Attention of a model: its heads, those of keys and values, and their size."""

    heads: int
    key_heads: int
    size: int
    sinks: bool = False


def activate(kernel: _Kernel, device: str, shape: HeadShape) -> str | None:
    """Make torch use the first package that is installed, fits this GPU and agrees with FlashAttention 2.

    `kernel`: attention by torch's varlen_attn, for a model of this shape. Returns the package's name, or None
    if FlashAttention 2 stays.
    """
    major, _ = torch.cuda.get_device_capability()
    known: list[str] = getattr(attention, "list_flash_attention_impls", list)()  # torch 2.11 has fewer
    for package in _PACKAGES:
        fits = package.name in known and major in package.capabilities
        if fits and is_installed(package.module) and _agrees(package, kernel, device, shape):
            return package.name
    return None


def _agrees(package: _Package, kernel: _Kernel, device: str, shape: HeadShape) -> bool:
    """Try it out, forward and backward; log why it is not used."""
    expected = _results(kernel, device, shape)

    def found() -> list[torch.Tensor]:
        attention.activate_flash_attention_impl(package.name)
        return _results(kernel, device, shape)

    if (fault := fault_of(found, expected)) is None:
        return True
    _log.warning("%s (%s) is installed but not used: %s", package.name, package.module, fault)
    if attention.current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()
    return False


def _results(kernel: _Kernel, device: str, shape: HeadShape) -> list[torch.Tensor]:
    """Return outputs and gradients, with a sliding window and without."""
    generator = torch.Generator().manual_seed(0)
    tokens, bounds = sum(_LENGTHS), torch.tensor([0, *_LENGTHS]).cumsum(0).to(device, torch.int32)
    segments = Segments(tuple((1, length) for length in _LENGTHS), bounds, max(_LENGTHS))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

    counts = (shape.heads, shape.key_heads, shape.key_heads)
    tensors = [normal(1, heads, tokens, shape.size).requires_grad_() for heads in counts]
    upstream = normal(tokens, shape.heads, shape.size)
    found: list[torch.Tensor] = []
    for window in (None, _WINDOW):
        out = kernel(*tensors, segments, None, window)
        found += [out.detach(), *torch.autograd.grad(out, tensors, upstream)]
    return found

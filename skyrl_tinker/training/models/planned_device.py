"""Type of device that a tensor is computed on: its own, or the one that fake tensors stand for.

Code that differs by device asks here, so that a profile of fake tensors takes the same way.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_planned: ContextVar[str | None] = ContextVar("planned_device", default=None)


def device_type(tensor: torch.Tensor) -> str:
    return _planned.get() or tensor.device.type


@contextmanager
def planning(device: str) -> Iterator[None]:
    """Take all tensors for tensors on that type of device."""
    token = _planned.set(device)
    try:
        yield
    finally:
        _planned.reset(token)

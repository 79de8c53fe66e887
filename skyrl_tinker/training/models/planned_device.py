"""Type of the device to compute on: the tensor's own, or the one that fake tensors represent.

Code that differs by device asks here, so that a profile of fake tensors takes the same code path.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_planned: ContextVar[str | None] = ContextVar("planned_device", default=None)


def device_type(of: torch.Tensor | torch.device) -> str:
    device = of if isinstance(of, torch.device) else of.device
    return _planned.get() or device.type


@contextmanager
def planning(device: str) -> Iterator[None]:
    """Treat all devices as this type ("cpu" or "cuda") in the context."""
    token = _planned.set(device)
    try:
        yield
    finally:
        _planned.reset(token)

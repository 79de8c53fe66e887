"""FlashAttention 3 and 4 run where torch, the GPU and the package agree, and nowhere else.

The kernels need a GPU. Here torch's own registry activates stand-ins, through which the kernel computes.
"""

import logging
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import attention as torch_attention
from torch.nn.attention import _registry

from skyrl_tinker.training.models.attention import choose
from skyrl_tinker.training.models.fused import flash_attention


class Handle:
    def remove(self) -> None:
        pass


def _kernel(factor: float = 1.0, error: Exception | None = None) -> Any:
    """Attention by segments; under an activated package, times a factor, or failing."""
    _, by_segments = choose("cpu", torch.float32)

    def run(*args: Any) -> torch.Tensor:
        out = by_segments(*args)
        if torch_attention.current_flash_attention_impl() is None:
            return out
        if error is not None:
            raise error
        return out * factor

    return run


@pytest.fixture(autouse=True)
def _packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both are installed, and this is a Hopper."""
    for name in ("flash_attn_interface", "flash_attn", "flash_attn.cute"):
        module = ModuleType(name)
        module.__spec__ = object()
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for name in ("FA3", "FA4"):
        monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, name, Handle)
    yield
    torch_attention.restore_flash_attention_impl(_raise_warn=False)


def test_the_package_for_this_gpu_is_activated(monkeypatch: pytest.MonkeyPatch) -> None:
    for major, expected in ((9, "FA3"), (10, "FA4"), (8, None)):
        torch_attention.restore_flash_attention_impl(_raise_warn=False)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=major: (found, 0))
        assert flash_attention.activate(_kernel(), "cpu") == expected
        assert torch_attention.current_flash_attention_impl() == expected


def test_what_is_not_installed_is_not_activated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flash_attn_interface")
    assert flash_attention.activate(_kernel(), "cpu") == "FA4"
    torch_attention.restore_flash_attention_impl()
    for name in ("flash_attn.cute", "flash_attn"):
        monkeypatch.delitem(sys.modules, name)
    assert flash_attention.activate(_kernel(), "cpu") is None


def test_what_torch_does_not_know_is_not_activated(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FA3", "FA4"):
        monkeypatch.delitem(_registry._FLASH_ATTENTION_IMPLS, name)
    assert flash_attention.activate(_kernel(), "cpu") is None


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"factor": 1.1}, r"relative error 0\.\d+, expected at most 0.02"),
        ({"error": ValueError("too many values to unpack")}, "ValueError: too many values to unpack"),
    ],
)
def test_a_package_that_fails_here_is_named_and_left_alone(
    fault: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert flash_attention.activate(_kernel(**fault), "cpu") is None
    assert torch_attention.current_flash_attention_impl() is None
    for name, found in zip(
        ("FA3 (flash_attn_interface)", "FA4 (flash_attn.cute)"), caplog.messages, strict=True
    ):
        assert re.fullmatch(rf"{re.escape(name)} is installed but not used: {message}", found)


def test_its_gradients_are_tried_too() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, out: torch.Tensor) -> torch.Tensor:
            return out.clone()

        @staticmethod
        def backward(ctx: Any, *upstream: torch.Tensor) -> torch.Tensor:
            return upstream[0] * 1.1

    _, by_segments = choose("cpu", torch.float32)

    def run(*args: Any) -> torch.Tensor:
        out = by_segments(*args)
        return out if torch_attention.current_flash_attention_impl() is None else Wrong.apply(out)

    assert flash_attention.activate(run, "cpu") is None

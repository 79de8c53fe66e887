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
from transformers import Gemma3TextConfig, GptOssConfig, LlamaConfig

from skyrl_tinker.training.models.attention import AttentionInputs, choose, shape_of
from skyrl_tinker.training.models.fused import flash_attention
from skyrl_tinker.training.models.fused.flash_attention import HeadShape

SHAPE = HeadShape(4, 2, 64)


class Handle:
    def remove(self) -> None:
        pass


def _kernel(factor: float = 1.0, error: Exception | None = None) -> Any:
    """Attention by segments; under an activated package, times a factor, or failing."""
    _, by_segments = choose("cpu", torch.float32)

    def run(*args: Any) -> torch.Tensor:
        out = by_segments(AttentionInputs(*args))
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
        assert flash_attention.activate(_kernel(), "cpu", SHAPE) == expected
        assert torch_attention.current_flash_attention_impl() == expected


def test_what_is_not_installed_is_not_activated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flash_attn_interface")
    assert flash_attention.activate(_kernel(), "cpu", SHAPE) == "FA4"
    torch_attention.restore_flash_attention_impl()
    for name in ("flash_attn.cute", "flash_attn"):
        monkeypatch.delitem(sys.modules, name)
    assert flash_attention.activate(_kernel(), "cpu", SHAPE) is None


def test_what_torch_does_not_know_is_not_activated(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FA3", "FA4"):
        monkeypatch.delitem(_registry._FLASH_ATTENTION_IMPLS, name)
    assert flash_attention.activate(_kernel(), "cpu", SHAPE) is None


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
        assert flash_attention.activate(_kernel(**fault), "cpu", SHAPE) is None
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
        out = by_segments(AttentionInputs(*args))
        return out if torch_attention.current_flash_attention_impl() is None else Wrong.apply(out)

    assert flash_attention.activate(run, "cpu", SHAPE) is None


def test_the_shape_of_the_model_is_tried() -> None:
    """A kernel that lacks its head size, or other heads for keys, must not end the trainer's start."""
    seen = set()
    _, by_segments = choose("cpu", torch.float32)

    def run(query: torch.Tensor, key: torch.Tensor, *args: Any) -> torch.Tensor:
        seen.add((query.shape[1], key.shape[1], query.shape[-1]))
        if torch_attention.current_flash_attention_impl() is not None and query.shape[-1] > 128:
            raise RuntimeError("head size 256 is not built")
        return by_segments(AttentionInputs(query, key, *args))

    gemma = Gemma3TextConfig(num_attention_heads=8, num_key_value_heads=4, head_dim=256)
    assert flash_attention.activate(run, "cpu", shape_of(gemma)) is None
    assert seen == {(8, 4, 256)}
    assert flash_attention.activate(run, "cpu", shape_of(LlamaConfig(hidden_size=256))) == "FA3"
    assert shape_of(LlamaConfig(hidden_size=256)) == HeadShape(32, 32, 8)
    assert shape_of(GptOssConfig()).sinks

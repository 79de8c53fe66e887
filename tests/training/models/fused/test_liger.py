"""The kernels of liger-kernel compute what stands for them on a CPU, and are used on a GPU after a trial."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from unittest.mock import Mock

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from skyrl_tinker.training.models.fused import gated_products, liger, rotary
from skyrl_tinker.training.models.fused.flash_attention import HeadShape
from skyrl_tinker.training.models.planned_device import planning

WIDTH, SHAPE, DTYPE = 24, HeadShape(4, 2, 16), torch.bfloat16
TRIALS: dict[str, tuple[str, Callable[[], bool]]] = {
    "gated products (silu) of width 24": (
        "gated_product",
        lambda: liger._multiplies_well("silu", WIDTH, DTYPE, "cpu"),
    ),
    "gated products (gelu) of width 24": (
        "gated_product_backward",
        lambda: liger._multiplies_well("gelu", WIDTH, DTYPE, "cpu"),
    ),
    "rotary embeddings of 4 heads of 16": ("rotate", lambda: liger._rotates_well(SHAPE, DTYPE, "cpu")),
}


@pytest.fixture(autouse=True)
def _untried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It is installed, and its kernels are those that stand for them."""
    trials = liger._multiplies_well, liger._rotates_well
    monkeypatch.setattr(liger, "installed", lambda: True)
    monkeypatch.setattr(liger, "name", lambda: "liger-kernel 1.2.3")
    monkeypatch.setattr(liger, "LIGER", liger.STAND_INS)
    yield
    for trial in trials:
        trial.cache_clear()


def test_it_is_found_where_it_and_triton_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert liger.installed() == bool(find_spec("liger_kernel") and find_spec("triton"))


def test_its_kernels_interpreted_compute_what_stands_for_them() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.training.support.liger_interpreted"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["errors"].keys() == {"product", "gate", "up", "query", "key"}
    assert max(found["errors"].values()) < 1e-5, found
    assert found["trials"] == {"products": True, "products too wide for it": False, "rotations": True}


@pytest.mark.parametrize("work", TRIALS)
def test_kernels_that_agree_pass_their_trial(work: str, caplog: pytest.LogCaptureFixture) -> None:
    assert TRIALS[work][1]()
    assert not caplog.messages


@pytest.mark.parametrize("work", TRIALS)
def test_a_kernel_that_fails_here_is_named_and_torch_computes(
    work: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    field, trial = TRIALS[work]
    fail = Mock(side_effect=RuntimeError("no C compiler was found"))
    monkeypatch.setattr(liger, "LIGER", liger.STAND_INS._replace(**{field: fail}))
    with caplog.at_level(logging.WARNING):
        assert not trial()
        assert not trial()
    assert caplog.messages == [
        f"liger-kernel 1.2.3 is installed but not used for {work} in torch.bfloat16: "
        "RuntimeError: no C compiler was found"
    ], "once"


def test_gradients_are_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor, kind: str) -> None:
        liger.STAND_INS.gated_product_backward(gate, up, dy, kind)
        up.mul_(1.1)

    def wrong_way(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return liger.STAND_INS.rotate(*args[:3], args[3].abs())

    monkeypatch.setattr(
        liger, "LIGER", liger.STAND_INS._replace(gated_product_backward=wrong, rotate=wrong_way)
    )
    assert not any(trial() for _, trial in TRIALS.values())


def test_only_a_gpu_needs_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    for name in ("_multiplies_well", "_rotates_well"):
        monkeypatch.setattr(liger, name, lambda *args: asked.append(args))
    for device in ("cpu", "cuda"):
        used = liger.multiplies("silu", WIDTH, DTYPE, device), liger.rotates(SHAPE, DTYPE, device)
        assert any(used) == (device == "cpu")
    assert asked == [("silu", WIDTH, DTYPE, "cuda"), (SHAPE, DTYPE, "cuda")]
    monkeypatch.setattr(liger, "installed", lambda: False)
    assert not liger.multiplies("silu", WIDTH, DTYPE, "cpu")
    assert not liger.rotates(SHAPE, DTYPE, "cpu")


def test_what_did_not_pass_is_computed_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for the very shapes and types that are to be computed."""
    asked = []
    for name in ("multiplies", "rotates"):
        monkeypatch.setattr(liger, name, lambda *args: asked.append(args))
    unusable = liger.Kernels(*3 * [lambda *_: pytest.fail("was refused")])
    monkeypatch.setattr(liger, "STAND_INS", unusable)
    gate, query, key = (torch.randn(1, heads, 5, 16) for heads in (1, 4, 2))
    angles = torch.randn(1, 5, 16)
    with planning("cuda"):
        gated_products.gated(ACT2FN["gelu_pytorch_tanh"], gate, gate)
        rotary.apply(apply_rotary_pos_emb, query, key, angles.cos(), angles.sin())
    assert asked == [("gelu", 16, torch.float32, "cpu"), (SHAPE, torch.float32, "cpu")]

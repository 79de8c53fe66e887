"""Networks of every family compute with CUDA's fused layers, run on a CPU, what they compute without."""

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedConfig

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.server.base_models.tiny_families import FAMILIES
from skyrl_tinker.training.models.fused import fused_layers, liger
from skyrl_tinker.training.models.fused.flash_attention import HeadShape
from skyrl_tinker.training.models.planned_device import planning
from skyrl_tinker.training.worker import Worker
from tests.support.tiny_models import write_tiny
from tests.training.conftest import MakeWorker
from tests.training.support.passes import assert_close, gradients_of, make_data, make_item, run_one

FULL, LORA = 1, 2
DATA = make_data((48, 15, 17, 5), 1)
WAYS = {"liger-kernel": True, "torch": False}
LAYERS = 2
MODELS = {FULL: LoraSpec(0, 0), LORA: LoraSpec(8, 1)}
EAGER = {"olmo3": ("rotary embeddings",), "gpt-oss": ("MLPs", "rotary embeddings")}
"""Layers with code of their own, which is run as it is."""


@pytest.fixture(params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    write_tiny(tmp_path / "model", arch=request.param, layers=LAYERS)
    return str(tmp_path / "model")


def _results(worker: Worker) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Return the logprobs and gradients of both models."""
    logprobs = [each for model in (FULL, LORA) for each in run_one(worker, make_item(model, DATA)).logprobs]
    full: Any = worker._models[ModelKey(FULL)]
    weights = full.network.causal_lm.named_parameters()
    gradients = {name: weight.grad.full_tensor().clone() for name, weight in weights}
    return logprobs, gradients | gradients_of(worker, LORA)


def test_fused_layers_compute_what_transformers_does(
    make_worker: MakeWorker, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, expected_gradients = _results(make_worker(directory, models=MODELS))
    for with_liger in WAYS.values():
        monkeypatch.setattr(liger, "installed", lambda found=with_liger: found)
        worker = make_worker(directory, models=MODELS)
        with planning("cuda"):
            found, gradients = _results(worker)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-5)
        assert_close(gradients, expected_gradients, 1e-5)


@pytest.mark.parametrize("arch", FAMILIES)
def test_every_norm_mlp_and_rotary_embedding_is_fused(
    make_worker: MakeWorker, tmp_path: Path, arch: str
) -> None:
    write_tiny(tmp_path / "model", arch=arch, layers=LAYERS)
    network = make_worker(str(tmp_path / "model"))._base
    ends = {"norms": "Norm", "MLPs": "MLP", "rotary embeddings": "Attention"}
    names = [type(module).__name__ for module in network.modules()]
    counts = Counter({kind: sum(name.endswith(end) for name in names) for kind, end in ends.items()})
    assert counts["rotary embeddings"] == LAYERS
    for kind in EAGER.get(arch, ()):
        counts[kind] = 0
    assert network.fused == counts


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("config", "product", "heads"),
    [
        (LlamaConfig(), ("silu", 11008), HeadShape(32, 32, 128)),
        (Gemma3TextConfig(), ("gelu", 9216), HeadShape(8, 4, 256)),
    ],
)
def test_the_log_names_what_computes_after_a_trial(
    way: str,
    config: PreTrainedConfig,
    product: tuple[str, int],
    heads: HeadShape,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tried: list[Any] = []
    for name in ("multiplies", "rotates"):
        monkeypatch.setattr(liger, name, lambda *args: tried.append(args) or WAYS[way])
    monkeypatch.setattr(liger, "name", lambda: way)
    counts = Counter({"norms": 5, "MLPs": 1, "rotary embeddings": 2})
    with caplog.at_level(logging.INFO):
        fused_layers.log_choice("cpu", torch.float32, config, counts)
        fused_layers.log_choice("cuda", torch.bfloat16, config, counts)
        fused_layers.log_choice("cuda", torch.bfloat16, config, Counter({"norms": 5}))
    on_gpu = torch.bfloat16, "cuda"
    assert tried == [(*product, *on_gpu), (heads, *on_gpu)], "none of layers that are not there"
    assert caplog.messages == [
        f"fused: 5 norms by torch, 1 MLPs by {way}, 2 rotary embeddings by {way}",
        "fused: 5 norms by torch, 0 MLPs by torch, 0 rotary embeddings by torch",
    ]


def test_other_code_stays_as_it_is() -> None:
    class Norm(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    assert not fused_layers.install(torch.nn.ModuleList([Norm(), torch.nn.Linear(2, 2)]))

"""bfloat16 for the computation only: adapters, gradients and the optimizer's state are float32."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_state
from transformers import AutoModelForCausalLM

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import LoraSpec, PassOutput
from skyrl_tinker.training.models.lora import LoraModel
from skyrl_tinker.training.worker import Worker
from tests.training.conftest import MakeWorker
from tests.training.support.passes import make_data, make_item, run_pass, step

MODELS = {1: LoraSpec(8, 1), 2: LoraSpec(8, 2)}


@pytest.fixture
def usual_model(untied_model: str, tmp_path: Path) -> str:
    """Weights of the usual size: those of the other tests are large, and so are bfloat16's errors there."""
    directory = tmp_path / "model"
    shutil.copytree(untied_model, directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(0.1)
    model.save_pretrained(directory)
    return str(directory)


def _adapter(worker: Worker, model: int) -> LoraModel:
    found = worker._models[ModelKey(model)]
    assert isinstance(found, LoraModel)
    return found


def test_adapters_trained_in_bfloat16_are_near_those_of_float32(
    make_worker: MakeWorker, usual_model: str
) -> None:
    workers = [make_worker(usual_model, 256, dtype, MODELS) for dtype in ("bfloat16", "float32")]
    items = [make_item(model, make_data((60, 40, 90), model)) for model in MODELS]
    outputs, expected = [run_pass(worker, *items) for worker in workers]
    for output, other in zip(outputs, expected, strict=True):
        assert isinstance(output, PassOutput)
        assert isinstance(other, PassOutput)
        for a, b in zip(output.logprobs, other.logprobs, strict=True):
            assert a.dtype == np.float32
            assert 0 < np.abs(a - b).max() < 0.05
    for model in MODELS:
        gradient, reference = (_adapter(worker, model)._gradients for worker in workers)
        assert float((gradient - reference).norm() / reference.norm()) < 5e-2


def test_what_is_kept_between_passes_is_float32(make_worker: MakeWorker, usual_model: str) -> None:
    worker = make_worker(usual_model, 256, "bfloat16", MODELS)
    run_pass(worker, make_item(1, make_data((20,), 1)))
    step(worker, 1)
    assert {tensor.dtype for tensor in _adapter(worker, 1).tensors()} == {torch.float32}
    assert {parameter.dtype for parameter in worker._base.parameters()} == {torch.bfloat16}


def test_fsdp_does_not_look_through_the_row_for_what_to_cast(
    make_worker: MakeWorker, untied_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker(untied_model, 256, "bfloat16", MODELS | {3: LoraSpec(0, 3)})
    seen = list[object]()
    monkeypatch.setattr(_fsdp_state, "_apply_to_tensors", lambda _, found: seen.append(found) or found)
    (output,) = run_pass(worker, make_item(3, make_data((40, 30), 1)))
    assert isinstance(output, PassOutput)
    assert not seen

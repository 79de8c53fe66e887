"""Base models that packed rows would compute wrongly are refused when they are loaded."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.errors import StartupError
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.models import attention
from skyrl_tinker.training.worker import Worker
from tests.support.tiny_models import write_tiny
from tests.training.conftest import MakeWorker
from tests.training.support.passes import make_data, make_item, run_one


@pytest.mark.parametrize(
    ("arch", "change", "message"),
    [
        ("llama", {"layer_types": ["full_attention", "chunked_attention"]}, "layers of type chunked_att"),
        ("gemma3", {"use_bidirectional_attention": True}, "bidirectional attention"),
    ],
)
def test_attention_that_the_kernels_do_not_know_is_refused(
    make_worker: MakeWorker, tmp_path: Path, arch: str, change: dict[str, Any], message: str
) -> None:
    write_tiny(tmp_path / "model", arch=arch, **change)
    with pytest.raises(StartupError, match=message):
        make_worker(str(tmp_path / "model"))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "factor": 2.0},
    ],
)
def test_positions_that_depend_on_the_longest_neighbour_are_refused(
    make_worker: MakeWorker, untied_model: str, tmp_path: Path, rope: dict[str, Any]
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(untied_model, directory)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"] = {"rope_theta": 10000.0, "original_max_position_embeddings": 256} | rope
    path.write_text(json.dumps(config))
    with pytest.raises(StartupError, match=f"rope type {rope['rope_type']}"):
        make_worker(str(directory))


def test_a_base_made_in_memory_is_that_of_its_directory(
    make_worker: MakeWorker, ranks: Ranks, untied_model: str
) -> None:
    loaded = make_worker(untied_model)
    causal_lm = Qwen3ForCausalLM.from_pretrained(untied_model, attn_implementation=attention.IMPLEMENTATION)
    given = Worker(replace(loaded.spec, directory="/nowhere"), 0)
    given.attach(ranks, causal_lm)
    outputs = []
    for worker in (loaded, given):
        worker.create_model(ModelKey(1), LoraSpec(8, 1))
        outputs.append(run_one(worker, make_item(1, make_data((40, 7), 1))))
    for found, expected in zip(outputs[0].logprobs, outputs[1].logprobs, strict=True):
        np.testing.assert_array_equal(found, expected)


def _changed(model: str, directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> str:
    """Copy a model with other tensors in its file."""
    shutil.copytree(model, directory)
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return str(directory)


@pytest.mark.parametrize("kept", [0, 7, 4000])
def test_a_file_that_was_cut_off_is_named(
    make_worker: MakeWorker, untied_model: str, tmp_path: Path, kept: int
) -> None:
    directory = tmp_path / "m"
    shutil.copytree(untied_model, directory)
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(StartupError, match=f"{file} of the base model cannot be read: "):
        make_worker(str(directory))


def test_a_missing_tensor_is_named(make_worker: MakeWorker, untied_model: str, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    directory = _changed(untied_model, tmp_path / "m", lambda tensors: tensors.pop(name))
    with pytest.raises(StartupError, match=f"hold no tensor {name}"):
        make_worker(directory)


def test_a_tensor_of_another_shape_is_named(
    make_worker: MakeWorker, untied_model: str, tmp_path: Path
) -> None:
    def shorten(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].contiguous()

    directory = _changed(untied_model, tmp_path / "m", shorten)
    with pytest.raises(StartupError, match=r"lm_head.weight .* expected \(512, 64\), found \(511, 64\)"):
        make_worker(directory)


def test_quantized_weights_are_refused(make_worker: MakeWorker, untied_model: str, tmp_path: Path) -> None:
    directory = tmp_path / "m"
    shutil.copytree(untied_model, directory)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError, match="quantized weights"):
        make_worker(str(directory))


def test_a_rank_of_eight_takes_memory_for_its_share_only(tmp_path: Path) -> None:
    """In a process of its own, whose peers are not there: most memory before and after, in bytes."""
    layer = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "head_dim": 64}
    config = Qwen3Config(**layer, num_hidden_layers=16, num_key_value_heads=8, vocab_size=1024)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    code = f"""
        import resource, torch, torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.testing._internal.distributed.fake_pg import FakeStore
        from skyrl_tinker.training.models.network import trainable_network
        from skyrl_tinker.training.trainer_spec import TrainerSpec
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        spec = TrainerSpec({str(tmp_path)!r}, 8, "cpu", "float32", 1, 64)
        network = trainable_network(spec, init_device_mesh("cpu", (8,)))
        held = sum(parameter.to_local().nbytes for parameter in network.parameters())
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, held)
    """
    done = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=True)
    peak, held = map(int, done.stdout.split())
    assert held == pytest.approx(size / 8, rel=0.02)
    assert peak < size / 2  # the share, as much of the mapped file, and the buffers of one tensor

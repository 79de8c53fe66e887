"""Weights for samplers: captured of several models at once, dealt over the ranks, in the samplers' dtype."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.manifest import FILE_NAME, read_manifest
from skyrl_tinker.domain.peft_config import ADAPTER_FILE
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.errors import StateLostError
from skyrl_tinker.training.models.trainable_model import Part
from skyrl_tinker.training.trainer_group import TrainerGroup, TrainerSpec
from tests.training.conftest import MakeWorker
from tests.training.support.passes import (
    assert_equal,
    make_data,
    make_item,
    perturb,
    run_one,
    step,
    weights_of,
)
from tests.training.support.saves import publish_weights, read_weights, write_weights

LORA, FULL = LoraSpec(8, 1), LoraSpec(0, 0)
A, B = ModelKey(1), ModelKey(2)


def _names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())


def test_unnamed_adapters_have_the_samplers_dtype_and_durable_ones_all_their_precision(
    make_worker: MakeWorker, tied_model: str, tmp_path: Path
) -> None:
    worker = make_worker(tied_model, dtype="bfloat16")
    sizes = worker.create_model(A, LORA)
    perturb(worker, A)
    weights = weights_of(worker, A)
    weight_bytes = sum(tensor.nbytes for tensor in weights.values())
    assert sizes == (weight_bytes, 3 * weight_bytes), "the bound of captured state counts these"
    write_weights(worker, A, tmp_path / "unnamed")
    write_weights(worker, A, tmp_path / "named", durable=True)
    unnamed, named = (load_file(tmp_path / name / ADAPTER_FILE) for name in ("unnamed", "named"))
    assert_equal(unnamed, {name: tensor.bfloat16() for name, tensor in weights.items()})
    assert_equal(named, weights)
    assert _names(tmp_path / "unnamed") == ["adapter_config.json", "adapter_model.safetensors"]
    assert read_manifest(tmp_path / "named").files.keys() == set(_names(tmp_path / "unnamed"))
    config = json.loads((tmp_path / "unnamed" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (8, 32, tied_model)


def test_full_weights_have_the_samplers_dtype(
    make_worker: MakeWorker, tied_model: str, tmp_path: Path
) -> None:
    worker = make_worker(tied_model, dtype="bfloat16")
    worker.create_model(A, FULL)
    write_weights(worker, A, tmp_path / "v1")
    model = worker._models[A]
    expected = {name: model.read(Part.WEIGHT, name).bfloat16() for name in model.shapes()}
    assert_equal(load_file(tmp_path / "v1" / "model.safetensors"), expected)
    assert not (tmp_path / "v1" / FILE_NAME).exists()


@pytest.mark.parametrize("spec", [LORA, FULL])
def test_what_is_captured_stays_whatever_the_model_does(
    make_worker: MakeWorker, tied_model: str, tmp_path: Path, spec: LoraSpec
) -> None:
    worker = make_worker(tied_model)
    worker.create_model(A, spec)
    write_weights(worker, A, tmp_path / "now")
    worker.capture_weights({A: 7}, {A: False})
    run_one(worker, make_item(A, make_data((20,), 1)))
    step(worker, A)
    worker.release(A)
    worker.write_state(7, str(tmp_path / "scratch"), str(tmp_path / "late"))
    np.testing.assert_equal(read_weights(tmp_path / "late"), read_weights(tmp_path / "now"))


def test_if_one_model_is_lost_none_is_captured(make_worker: MakeWorker, tied_model: str) -> None:
    worker = make_worker(tied_model)
    worker.create_model(A, LORA)
    with pytest.raises(StateLostError, match="no state of model 2"):
        worker.capture_weights({A: 0, B: 1}, {A: False, B: False})
    assert worker._captured == {}


@pytest.mark.long
async def test_ranks_share_the_writing_of_full_weights(
    ray_cluster: None, untied_model: str, tmp_path: Path
) -> None:
    found = []
    for ranks in (1, 2):
        group = TrainerGroup.launch(TrainerSpec(untied_model, ranks, "cpu", "float32", 1, 64, timeout_s=60.0))
        await group.ready()
        for model, spec in ((A, LORA), (B, FULL)):
            await group.create_model(model, spec)
            await publish_weights(group, model, tmp_path / f"{ranks}-{model}")
        await group.shutdown()
        found.append({model: read_weights(tmp_path / f"{ranks}-{model}") for model in (A, B)})
    for model in (A, B):
        assert found[0][model].keys() == found[1][model].keys()
        for name, array in found[0][model].items():
            np.testing.assert_array_equal(found[1][model][name], array)
    assert _names(tmp_path / "2-1") == ["adapter_config.json", "adapter_model.safetensors"]
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert _names(tmp_path / "2-2") == [*shards, "model.safetensors.index.json"]
    sizes = [(tmp_path / "2-2" / shard).stat().st_size for shard in shards]
    assert max(sizes) < 1.2 * min(sizes)

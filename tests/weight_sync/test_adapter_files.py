"""Published adapters are PEFT directories that exist only complete."""

import json
import resource
from pathlib import Path

import numpy as np
import peft
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file

from skyrl_tinker.domain.values import AdapterWeights
from skyrl_tinker.weight_sync.adapter_files import publish_adapter
from tests.inference.support.samplers import (
    prompt_of,
    random_adapter,
    reference,
    target_logprobs,
    write_model,
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", tied=False)
    return tmp_path / "model"


def test_peft_reads_it_and_gives_the_same_logprobs(model: Path, tmp_path: Path) -> None:
    adapter = random_adapter(model, 4, seed=1)
    publish_adapter(adapter, tmp_path / "v1", str(model))
    adapted = peft.PeftModel.from_pretrained(reference(model), tmp_path / "v1")
    prompt = prompt_of(12)
    np.testing.assert_allclose(
        target_logprobs(adapted, prompt), target_logprobs(reference(model, adapter), prompt), atol=1e-4
    )


def test_it_names_the_modules_that_are_adapted(model: Path, tmp_path: Path) -> None:
    adapter = random_adapter(model, 4, seed=1, unembed=False)
    kept = {name: value for name, value in adapter.tensors.items() if ".mlp." in name}
    publish_adapter(AdapterWeights(adapter.spec, kept), tmp_path / "v1", "tiny")
    config = json.loads((tmp_path / "v1" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "gate_proj", "up_proj"]
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 32, "tiny")


def test_a_half_written_attempt_is_replaced_and_nothing_else_is_left(model: Path, tmp_path: Path) -> None:
    adapter = random_adapter(model, 4, seed=1)
    (tmp_path / "out" / ".v1.partial").mkdir(parents=True)
    (tmp_path / "out" / "v1").mkdir()
    publish_adapter(adapter, tmp_path / "out" / "v1", "tiny")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["v1"]
    assert load_file(tmp_path / "out" / "v1" / "adapter_model.safetensors").keys() == adapter.tensors.keys()


def test_a_full_disk_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises((OSError, SafetensorError)):
            publish_adapter(random_adapter(model, 4, seed=1), tmp_path / "out" / "v1", "tiny")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "out").iterdir()) == []

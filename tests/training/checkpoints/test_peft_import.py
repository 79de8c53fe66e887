"""Adapters that PEFT itself saved compute the same here."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.errors import UserError
from skyrl_tinker.training.checkpoints import checkpoint_save
from skyrl_tinker.training.checkpoints.peft_import import convert, read_foreign
from tests.support.peft_adapters import save_adapter, token_logprobs
from tests.training.conftest import MakeWorker
from tests.training.support.passes import make_data, make_item, run_one

DATA = make_data((30, 20), 50)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]

ADAPTERS: dict[str, tuple[dict[str, Any], LoraSpec]] = {
    "all": ({"r": 8, "lora_alpha": 32, "target_modules": ALL}, LoraSpec(8, 0, train_unembed=False)),
    "two of four": (
        {"r": 4, "lora_alpha": 20, "target_modules": ["q_proj", "v_proj"]},
        LoraSpec(4, 0, train_mlp=False, train_unembed=False),
    ),
    "rank-stabilised": (
        {"r": 8, "lora_alpha": 6.5, "target_modules": ["up_proj"], "use_rslora": True},
        LoraSpec(8, 0, train_attn=False, train_unembed=False),
    ),
    "one layer": (
        {"r": 2, "lora_alpha": 4, "target_modules": ATTENTION, "layers_to_transform": [1]},
        LoraSpec(2, 0, train_mlp=False, train_unembed=False),
    ),
    "head": (
        {"r": 4, "lora_alpha": 8, "target_modules": ["lm_head", "down_proj"]},
        LoraSpec(4, 0, train_attn=False),
    ),
}

# PEFT warns of what is meant here: a head is adapted, and a tied embedding left alone.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_converted_adapter_gives_the_logprobs_that_peft_gives(
    make_worker: MakeWorker, model_directory: str, tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    config, spec = ADAPTERS[kind]
    peft = save_adapter(model_directory, tmp_path / "foreign", dtype, **config)
    model = convert(read_foreign(tmp_path / "foreign"), model_directory)
    assert model.spec == spec
    captured = checkpoint_save.capture(model, model_directory, optimizer=False, rank=0, world=1)
    files = checkpoint_save.persist(captured, tmp_path / "scratch")
    checkpoint_save.commit(captured.contents, files, tmp_path / "scratch", tmp_path / "ours")
    worker = make_worker(model_directory)
    worker.create_model(ModelKey(1), spec)
    worker.load_state(ModelKey(1), str(tmp_path / "ours"), False)
    output = run_one(worker, make_item(1, DATA, backward=False))
    for datum, found in zip(DATA, output.logprobs, strict=True):
        expected = token_logprobs(peft, datum.tokens.tolist(), datum.target_tokens.tolist())
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


@pytest.fixture
def adapter(untied_model: str, tmp_path: Path) -> Path:
    save_adapter(untied_model, tmp_path / "foreign", r=4, target_modules=["q_proj", "lm_head"])
    return tmp_path / "foreign"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA', expected 'LORA'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all', expected 'none'"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"target_parameters": 5}, "target_parameters is 5, expected nothing"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"of_a_later_version": 1}, "of_a_later_version is 1"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS', expected 'CAUSAL_LM'"),
        ({"init_lora_weights": "pissa"}, "'pissa', which changes the base"),
        ({"r": 0}, "r is 0, expected a positive number"),
        ({"r": 2.5}, "r is 2.5, expected a whole number"),
        ({"r": 8}, r"lora_A.weight has shape \(4, 64\), the base model expects \(8, 64\)"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"lora_alpha": 1e300}, r"lora_B.weight times .*, which fits lora_alpha to ours, is beyond float32"),
    ],
)
def test_what_plain_lora_cannot_equal_is_refused(
    adapter: Path, untied_model: str, changes: dict[str, Any], message: str
) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UserError, match=message):
        convert(read_foreign(adapter), untied_model)


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({Q: None}, "q_proj.lora_A.weight without base_model"),
        ({Q: torch.zeros(3, 4)}, r"has shape \(3, 4\), the base model expects \(128, 4\)"),
        ({Q: torch.full((128, 4), torch.inf)}, "not finite"),
        ({Q: torch.zeros(128, 4, dtype=torch.int64)}, "dtype torch.int64, expected one of torch.float32"),
        (
            {Q.replace("layers.0", "layers.9"): torch.zeros(128, 4)},
            "layers.9.self_attn.q_proj, expected LoRA",
        ),
        ({Q.replace("q_proj", "qkv_proj"): torch.zeros(128, 4)}, "qkv_proj, expected LoRA pairs of"),
        ({"base_model.model.lm_head.base_layer.weight": torch.zeros(512, 64)}, "copies of the base"),
        ({"base_model.model.lm_head.lora_magnitude_vector": torch.zeros(512)}, "copies of the base"),
    ],
)
def test_tensors_that_fit_nothing_are_named(
    adapter: Path, untied_model: str, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file) | changes
    save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, file)
    with pytest.raises(UserError, match=message):
        convert(read_foreign(adapter), untied_model)


def test_an_empty_adapter_is_refused(adapter: Path, untied_model: str) -> None:
    save_file({}, adapter / "adapter_model.safetensors")
    with pytest.raises(UserError, match="found no tensors"):
        convert(read_foreign(adapter), untied_model)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("content", [None, b"[]"])
def test_a_file_that_is_missing_or_is_something_else_is_named(
    adapter: Path, name: str, content: bytes | None
) -> None:
    if content is None:
        (adapter / name).unlink()
    else:
        (adapter / name).write_bytes(content)
    with pytest.raises(UserError, match=name):
        read_foreign(adapter)

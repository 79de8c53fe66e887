"""Sizes of models in training, from a base model's shapes alone."""

from math import prod
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl_tinker import config
from skyrl_tinker.domain.state_size import parameters
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.server.base_models import base_model
from skyrl_tinker.server.base_models.tiny_families import FAMILIES
from skyrl_tinker.training.checkpoints.peft_import import base_targets
from skyrl_tinker.training.models.lora import LoraModel
from tests.support.tiny_models import write_tiny


@pytest.mark.parametrize("arch", FAMILIES)
def test_parameters_of_every_family_are_counted_without_loading_it(tmp_path: Path, arch: str) -> None:
    write_tiny(tmp_path / "model", arch=arch)
    directory = str(tmp_path / "model")
    facts = base_model.resolve(config.load(base_model=directory))
    for spec in (LoraSpec(8, 0), LoraSpec(2, 0, train_attn=False, train_unembed=False)):
        model = LoraModel(spec, base_targets(directory), torch.device("cpu"))
        assert parameters(facts, spec) == sum(map(prod, model.shapes().values()))
    with torch.device("meta"):
        full = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    matrices = [tensor for name, tensor in full.named_parameters() if tensor.ndim > 1 and "bias" not in name]
    assert parameters(facts, LoraSpec(0, 0)) == sum(tensor.numel() for tensor in matrices)

"""The size that the API reckons with is that of the tensors that the ranks hold."""

from pathlib import Path

import pytest
import torch

from skyrl_tinker.config import Settings
from skyrl_tinker.domain import state_size
from skyrl_tinker.domain.values import BaseModelFacts, LoraSpec
from skyrl_tinker.server.base_models import base_model
from skyrl_tinker.training.checkpoints.peft_import import base_targets
from skyrl_tinker.training.models.lora import LoraModel
from skyrl_tinker.training.models.trainable_model import MOMENTS
from tests.training.support import reference


def facts_of(directory: str, home: Path) -> BaseModelFacts:
    return base_model.resolve(Settings(base_model=directory, home=home))


@pytest.mark.parametrize("parts", [(True, True, True), (True, False, False), (False, True, True)])
def test_an_adapters_size_is_exact(any_directory: str, tmp_path: Path, parts: tuple[bool, ...]) -> None:
    mlp, attn, unembed = parts
    spec = LoraSpec(6, 1, train_mlp=mlp, train_attn=attn, train_unembed=unembed)
    model = LoraModel(spec, base_targets(any_directory), torch.device("cpu"))
    size = sum(a.nbytes + b.nbytes for a, b in model.pairs.values())
    assert state_size.state_bytes(facts_of(any_directory, tmp_path), spec, "adamw") == size * 4


def test_a_full_models_size_is_right_but_for_norms(any_directory: str, tmp_path: Path) -> None:
    parameters = sum(each.numel() for each in reference.load(any_directory).parameters() if each.ndim > 1)
    found = state_size.state_bytes(facts_of(any_directory, tmp_path), LoraSpec(0, 0), "dimuon")
    assert found == parameters * 4 * 3


def test_the_moments_are_those_of_the_optimizers() -> None:
    assert {name: len(parts) for name, parts in MOMENTS.items()} == state_size.MOMENTS

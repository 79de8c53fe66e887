"""One estimate of the memory of a base model's processes on CPUs."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_tinker import config
from skyrl_tinker.domain.state_size import parameters
from skyrl_tinker.domain.units import MiB
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.engine.bases.base_memory import RANK_BYTES, base_memory
from skyrl_tinker.inference.servers.sampler_memory import PROCESS_BYTES
from tests.engine.support.world import FACTS

MODEL = replace(FACTS, num_heads=2, intermediate_size=128)
"""Base model of 131,072 parameters, half a MiB in float32."""
SAMPLER = PROCESS_BYTES + 64 * MiB + MiB * 5 // 8


@pytest.mark.parametrize(
    ("given", "trained", "expected"),
    [
        ({}, True, RANK_BYTES + MiB + SAMPLER),
        ({"replicas": 2, "trainer_ranks": 2}, True, 2 * RANK_BYTES + MiB + 2 * SAMPLER),
        ({"trainer_dtype": "bfloat16"}, True, RANK_BYTES + MiB // 2 + SAMPLER - MiB * 5 // 16),
        ({"tensor_parallel_size": 2}, False, PROCESS_BYTES + SAMPLER),
        ({"vllm_args": {"data-parallel-size": 2}}, False, 2 * SAMPLER),
        ({}, False, SAMPLER),
        ({"replicas": 0}, True, RANK_BYTES + MiB),
        ({"sampler_urls": ["http://localhost:1"]}, False, 0),
        ({"ray_address": "10.0.0.1:6379"}, True, 0),
    ],
)
def test_it_has_weights_and_every_process(
    tmp_path: Path, given: dict[str, Any], trained: bool, expected: int
) -> None:
    settings = config.load(home=tmp_path, max_lora_rank=0, **given)
    assert base_memory(settings, MODEL, trained=trained) == expected


def test_a_sampler_has_slots_of_adapters_for_each_copy(tmp_path: Path) -> None:
    def size(**given: Any) -> int:
        return base_memory(config.load(home=tmp_path, **given), MODEL, trained=False)

    one = size(max_lora_rank=8, max_loras=1) - SAMPLER
    assert one == 4 * parameters(MODEL, LoraSpec(8, 0)) > 0
    assert size(max_lora_rank=8, max_loras=3, replicas=2) == 2 * (SAMPLER + 3 * one)


def test_of_a_base_model_that_is_not_known_it_has_the_processes(tmp_path: Path) -> None:
    settings = config.load(home=tmp_path, replicas=2)
    assert base_memory(settings, None, trained=True) == RANK_BYTES + 2 * PROCESS_BYTES


def test_it_needs_neither_torch_nor_ray() -> None:
    """`doctor` tells that they are missing."""
    module = base_memory.__module__
    look = f"import sys, {module}; sys.exit(bool(sys.modules.keys() & {{'torch', 'ray', 'vllm'}}))"
    assert subprocess.run([sys.executable, "-c", look]).returncode == 0

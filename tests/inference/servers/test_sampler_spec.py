"""Memory and flags of a replica, from its specification alone."""

from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_tinker.domain.units import MiB
from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.errors import SamplerError
from skyrl_tinker.inference.servers.sampler_spec import SamplerSpec, flags, require_memory

FACTS = BaseModelFacts("/nowhere", ("tiny",), "Qwen3ForCausalLM", 512, 128, 2, 1, 64, 64, True, (0,))
SPEC = SamplerSpec(FACTS, 129, "cpu", "float32", 8, 1, 1, "/nowhere", 1.0)


def value_of(given: list[str], flag: str) -> str:
    assert given.count(flag) == 1, flag
    return given[given.index(flag) + 1]


def test_weights_in_another_format_take_no_memory(tmp_path: Path) -> None:
    spec = replace(SPEC, model=replace(FACTS, directory=str(tmp_path)))
    for name in ("model.safetensors", "consolidated.safetensors"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(1024 * MiB)
    with pytest.raises(SamplerError, match=r"2048 for weights"):
        require_memory(spec, available=0)


def test_vllm_reads_the_same_files_of_a_model_as_the_trainer() -> None:
    given = flags(SPEC, 1)
    assert {value_of(given, f"--{name}") for name in ("load-format", "config-format", "tokenizer-mode")} == {
        "hf"
    }

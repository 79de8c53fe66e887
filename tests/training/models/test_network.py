"""Base models that packed rows would compute wrongly are refused when they are loaded."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import MistralConfig, MistralForCausalLM, Qwen3ForCausalLM

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.errors import StartupError
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.models import attention
from skyrl_tinker.training.worker import Worker
from tests.training.conftest import MakeWorker
from tests.training.support.passes import make_data, make_item, run_one


def _mistral(directory: Path, sliding_window: int | None) -> str:
    config = MistralConfig(
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=64,
        vocab_size=64,
        max_position_embeddings=512,
        sliding_window=sliding_window,
    )
    MistralForCausalLM(config).save_pretrained(directory)
    return str(directory)


def test_a_sliding_window_below_the_context_is_refused(make_worker: MakeWorker, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="a sliding window of 32 tokens"):
        make_worker(_mistral(tmp_path / "short", 32))
    for number, window in enumerate((None, 512)):
        make_worker(_mistral(tmp_path / str(number), window))


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

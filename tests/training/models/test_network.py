"""Base models that packed rows would compute wrongly are refused when they are loaded."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import MistralConfig, MistralForCausalLM

from skyrl_tinker.errors import StartupError
from tests.training.conftest import MakeWorker


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

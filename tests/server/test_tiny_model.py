import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_tinker.errors import StartupError
from skyrl_tinker.server.base_models.tiny_families import FAMILIES
from skyrl_tinker.server.base_models.tiny_model import make_model

CHAT = [{"role": "user", "content": "What is 3 + 4?"}]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", FAMILIES)
def test_transformers_loads_every_weight_and_no_other(tmp_path: Path, arch: str, tied: bool) -> None:
    make_model(tmp_path, arch=arch, hidden=64, tied=tied)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert type(model).__name__ == FAMILIES[arch].architecture
    expected = tied and not FAMILIES[arch].untied
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == expected


def test_the_default_has_about_a_million_parameters(tmp_path: Path) -> None:
    make_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert 0.8e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.2e6


def test_the_same_arguments_give_the_same_bytes_and_another_seed_other_weights(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_model(tmp_path / name, seed=seed)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    content = {name: [(tmp_path / name / file).read_bytes() for file in files] for name in "abc"}
    assert content["a"] == content["b"]
    assert content["a"] != content["c"]


def test_the_tokenizer_gives_back_any_text_and_keeps_special_tokens_whole(tmp_path: Path) -> None:
    make_model(tmp_path, hidden=64)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "<|im_start|>user\nWhat is 12+3? é 日本 🙂\t  <|im_end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens([ids[0], ids[-1]]) == ["<|im_start|>", "<|im_end|>"]
    assert len(tokenizer.encode("1234")) == 4
    assert max(ids) < 512


def test_the_chat_template_is_chatml(tmp_path: Path) -> None:
    make_model(tmp_path, hidden=64)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.parametrize(
    ("argument", "value"), [("hidden", 96), ("hidden", 0), ("layers", 0), ("vocab", 258), ("arch", "bert")]
)
def test_impossible_shapes_are_refused_by_name(tmp_path: Path, argument: str, value: Any) -> None:
    with pytest.raises(StartupError, match=f"--{argument} .*{value}"):
        make_model(tmp_path / "model", **{argument: value})
    assert not (tmp_path / "model").exists()


def test_make_model_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    script = """
import pathlib, sys
from skyrl_tinker.server.base_models.tiny_model import make_model
make_model(pathlib.Path(sys.argv[1]))
assert not {"torch", "transformers"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)

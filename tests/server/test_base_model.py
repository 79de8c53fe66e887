import json
from pathlib import Path
from typing import Any

import pytest

from skyrl_tinker import config
from skyrl_tinker.domain.sampler_abilities import SamplerAbilities
from skyrl_tinker.errors import StartupError
from skyrl_tinker.server.base_models import base_model
from skyrl_tinker.server.base_models.tiny_families import FAMILIES
from skyrl_tinker.server.base_models.tiny_model import make_model
from tests.support.shards import write_index


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_model(tmp_path / "model", hidden=64, tied=False)
    return tmp_path / "model"


def change(model: Path, **values: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_tiny_is_made_on_first_use_and_kept(tmp_path: Path) -> None:
    settings = config.load(home=tmp_path)
    first = base_model.resolve(settings)
    weights = Path(first.directory, "model.safetensors")
    made = weights.stat().st_mtime_ns
    assert base_model.resolve(settings) == first
    assert weights.stat().st_mtime_ns == made
    assert first.names == ("tiny", str(tmp_path / "models" / "tiny"))


def test_facts_of_a_directory_come_from_its_files(model: Path) -> None:
    facts = base_model.resolve(config.load(base_model=str(model)))
    assert facts.directory == str(model)
    assert (facts.architecture, facts.vocab_size, facts.hidden_size) == ("Qwen3ForCausalLM", 512, 64)
    assert (facts.num_layers, facts.num_kv_heads, facts.head_dim, facts.tied) == (2, 1, 32, False)
    assert facts.eos_token_ids == (2, 0)
    assert facts.sampler == SamplerAbilities("vLLM", 0.01)


def test_a_directory_is_served_under_its_given_name_and_its_path(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    assert base_model.resolve(config.load(base_model="model")).names == ("model", str(model))
    named = config.load(base_model="model", model_name="Qwen/Qwen3-8B")
    assert base_model.resolve(named).names == ("Qwen/Qwen3-8B", "model", str(model))


def test_the_context_is_at_most_the_model_s_and_4096_unless_set(model: Path) -> None:
    assert base_model.resolve(config.load(base_model=str(model))).context_length == 4096
    assert base_model.resolve(config.load(base_model=str(model), context_length=6000)).context_length == 6000
    change(model, max_position_embeddings=512)
    assert base_model.resolve(config.load(base_model=str(model))).context_length == 512
    with pytest.raises(StartupError, match="context_length is 6000, expected at most 512"):
        base_model.resolve(config.load(base_model=str(model), context_length=6000))


def test_without_generation_config_the_end_token_of_config_counts(model: Path) -> None:
    (model / "generation_config.json").unlink()
    assert base_model.resolve(config.load(base_model=str(model))).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"head_dim": 16}, "head_dim 16 .* one of 32, 64"),
        ({"architectures": ["BertModel"]}, "BertModel is not supported; supported: Qwen3ForCausalLM"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer, found 'many'"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_with_the_reason(
    model: Path, values: dict[str, Any], message: str
) -> None:
    change(model, **values)
    with pytest.raises(StartupError, match=message):
        base_model.resolve(config.load(base_model=str(model)))


@pytest.mark.parametrize(
    ("changed", "settings", "message"),
    [
        ({"mlp_only_layers": [0]}, {}, "expected experts in all layers"),
        ({"decoder_sparse_step": 2}, {}, "expected experts in all layers"),
        ({"use_sliding_window": True, "sliding_window": 64}, {}, "sliding windows are not supported"),
        ({"num_experts_per_tok": 0}, {}, "num_experts_per_tok must be a positive integer, found 0"),
        ({}, {"vllm_args": {"data-parallel-size": 2}}, "expected 1 for a mixture.* or max_lora_rank = 0"),
        (
            {},
            {"router_replay": True, "vllm_args": {"enable-prefix-caching": False}},
            "enable-prefix-caching: found false, expected true with router_replay",
        ),
        (
            {},
            {"router_replay": True, "vllm_args": {"speculative-config": {"method": "ngram"}}},
            "speculative-config: expected none with router_replay",
        ),
    ],
)
def test_mixtures_that_would_not_run_are_refused(
    tmp_path: Path, changed: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    make_model(tmp_path / "model", arch="qwen3-moe")
    change(tmp_path / "model", **changed)
    with pytest.raises(StartupError, match=message):
        base_model.resolve(config.load(base_model=str(tmp_path / "model"), **settings))


def test_ranks_of_a_mixture_may_sample_beside_each_other_without_adapters(tmp_path: Path) -> None:
    make_model(tmp_path / "model", arch="qwen3-moe")
    arguments = {"data-parallel-size": 2, "enable-expert-parallel": True}
    given = {"base_model": str(tmp_path / "model"), "max_lora_rank": 0, "vllm_args": arguments}
    assert base_model.resolve(config.load(**given)).experts


def test_router_replay_is_refused_without_experts(model: Path) -> None:
    with pytest.raises(StartupError, match="router_replay: expected Qwen3MoeForCausalLM, found Qwen3ForCa"):
        base_model.resolve(config.load(base_model=str(model), router_replay=True))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config: .* found mxfp4"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps: expected 1e-05, found 1e-06"),
        ({"attention_bias": False}, "attention_bias: expected True, found False"),
        ({"swiglu_limit": 10.0}, "swiglu_limit: expected 7.0, found 10.0"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings: expected False, found True"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type: expected yarn, found linear"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "expected sliding_attention and full_"),
    ],
)
def test_what_vllm_s_gpt_oss_does_not_read_is_refused(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    make_model(tmp_path / "model", arch="gpt-oss", hidden=64)
    change(tmp_path / "model", layer_types=["sliding_attention", "full_attention"])
    base_model.resolve(config.load(base_model=str(tmp_path / "model")))
    change(tmp_path / "model", **changed)
    with pytest.raises(StartupError, match=f"GptOssForCausalLM: .*{message}"):
        base_model.resolve(config.load(base_model=str(tmp_path / "model")))


@pytest.mark.parametrize("arch", FAMILIES)
def test_every_family_is_served(tmp_path: Path, arch: str) -> None:
    make_model(tmp_path / "model", arch=arch, hidden=64)
    facts = base_model.resolve(config.load(base_model=str(tmp_path / "model")))
    assert facts.architecture == FAMILIES[arch].architecture


QWEN = {"use_sliding_window": True, "sliding_window": 16}
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("arch", "values", "message"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window must be a positive integer or null, found 0"),
        ("mistral", {"layer_types": [SLIDING, FULL]}, "has its sliding window in all layers"),
        ("mistral", {"max_position_embeddings": None}, "max_position_embeddings"),
        ("llama", {"sliding_window": 16}, "the trainer's Llama has no sliding windows"),
        ("llama", {"layer_types": [FULL, "chunked_attention"]}, "layer_types chunked_attention are not"),
        ("qwen2", QWEN | {"max_window_layers": 1}, "in all layers or in none, not in some"),
        ("qwen3", QWEN | {"layer_types": [SLIDING, FULL]}, "in all layers or in none, not in some"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
    ],
)
def test_windows_that_trainer_and_samplers_would_not_both_have_are_refused(
    tmp_path: Path, arch: str, values: dict[str, Any], message: str
) -> None:
    make_model(tmp_path / "model", arch=arch, hidden=64)
    change(tmp_path / "model", **values)
    with pytest.raises(StartupError, match=message):
        base_model.resolve(config.load(base_model=str(tmp_path / "model")))


@pytest.mark.parametrize(
    ("arch", "values"),
    [
        ("llama", {"sliding_window": 8192}),  # as long as the context
        ("qwen2", {"use_sliding_window": False, "max_window_layers": 1}),
        ("qwen2", {"max_window_layers": 2}),
        ("qwen3", QWEN | {"max_window_layers": 0}),
        ("qwen3", QWEN | {"layer_types": [SLIDING, SLIDING]}),
        ("mistral", {"sliding_window": None, "layer_types": [FULL, FULL]}),
    ],
)
def test_windows_in_all_layers_and_those_that_are_off_are_served(
    tmp_path: Path, arch: str, values: dict[str, Any]
) -> None:
    make_model(tmp_path / "model", arch=arch, hidden=64)
    change(tmp_path / "model", **values)
    base_model.resolve(config.load(base_model=str(tmp_path / "model")))


@pytest.mark.parametrize(("workers", "heads", "kv_heads"), [(2, 6, 3), (3, 4, 3), (4, 6, 2)])
def test_workers_that_cannot_share_the_heads_are_refused(
    model: Path, workers: int, heads: int, kv_heads: int
) -> None:
    change(model, num_attention_heads=heads, num_key_value_heads=kv_heads)
    with pytest.raises(StartupError, match=f"tensor_parallel_size {workers}: .* {kv_heads} key-value heads"):
        base_model.resolve(config.load(base_model=str(model), tensor_parallel_size=workers))


@pytest.mark.parametrize(("workers", "heads", "kv_heads"), [(3, 6, 3), (2, 8, 4), (8, 8, 2)])
def test_workers_share_heads_that_they_divide(model: Path, workers: int, heads: int, kv_heads: int) -> None:
    change(model, num_attention_heads=heads, num_key_value_heads=kv_heads)
    found = base_model.resolve(config.load(base_model=str(model), tensor_parallel_size=workers))
    assert (found.num_heads, found.num_kv_heads) == (heads, kv_heads)


def test_a_head_size_that_only_the_cpu_lacks_is_fine_on_cuda(model: Path) -> None:
    change(model, head_dim=16)
    assert base_model.resolve(config.load(base_model=str(model), device="cuda")).head_dim == 16


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no config.json in that directory"):
        base_model.resolve(config.load(base_model=str(tmp_path)))


def test_a_directory_that_is_not_there_is_refused_as_such(tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    for path in (tmp_path / "nothing", file):
        with pytest.raises(StartupError, match=rf"^--base-model {path}: no such directory$"):
            base_model.resolve(config.load(base_model=str(path)))


def test_a_model_from_the_hub_keeps_its_name_there(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(model))
    named = base_model.resolve(config.load(base_model="org/model", model_name="mine"))
    assert (named.hub_name, named.name, named.directory) == ("org/model", "mine", str(model))
    assert base_model.resolve(config.load(base_model=str(model))).hub_name is None


def test_a_model_with_a_missing_shard_is_refused(model: Path) -> None:
    _, second = write_index(model, ["a", "b"])
    with pytest.raises(StartupError, match=second.name):
        base_model.resolve(config.load(base_model=str(model)))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"\xff\xfe{}", b'{"a": '])
def test_a_file_that_is_no_json_is_named(model: Path, name: str, content: bytes) -> None:
    (model / name).write_bytes(content)
    with pytest.raises(StartupError, match=f"cannot read {model}/{name}: "):
        base_model.resolve(config.load(base_model=str(model)))


@pytest.mark.parametrize(
    "values", [{"head_dim": "wide"}, {"num_key_value_heads": [1]}, {"architectures": {"a": 1}}]
)
def test_a_config_with_values_of_another_kind_is_named(model: Path, values: dict[str, Any]) -> None:
    change(model, **values)
    with pytest.raises(StartupError, match=rf"config\.json or generation_config\.json in {model} is damaged"):
        base_model.resolve(config.load(base_model=str(model)))


def test_an_end_of_sequence_of_another_kind_is_named(model: Path) -> None:
    (model / "generation_config.json").write_text('{"eos_token_id": "<|im_end|>"}')
    with pytest.raises(StartupError, match="is damaged: ValueError"):
        base_model.resolve(config.load(base_model=str(model)))

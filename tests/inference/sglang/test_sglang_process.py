"""SGLang's process: what its command line says, and what is refused before it starts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_tinker import config
from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.errors import StartupError
from skyrl_tinker.inference.constants import TOKEN
from skyrl_tinker.inference.sglang.sglang_process import SglangProcess
from skyrl_tinker.server import preflight
from skyrl_tinker.server.base_models import catalog
from skyrl_tinker.server.base_models.base_model import resolve
from skyrl_tinker.server.base_models.tiny_families import FAMILIES
from tests.inference.support.samplers import spec_of, write_model
from tests.support.tiny_models import write_tiny

SGLANG = SglangProcess(Path("/env/python"))


@pytest.fixture
def facts(tmp_path: Path) -> BaseModelFacts:
    return write_model(tmp_path / "model", tied=False)


def test_adapters_have_as_many_places_as_are_set_beside_the_base(
    facts: BaseModelFacts, tmp_path: Path
) -> None:
    spec = replace(spec_of(facts, tmp_path), token="secret", engine=SGLANG)
    python, _, entry, variable, *flags = SGLANG.command(spec, 81, "127.0.0.1")
    given = " ".join(flags)
    assert (python, variable, Path(entry).is_file()) == ("/env/python", TOKEN, True)
    assert f"--max-loras-per-batch {spec.max_loras + 1} --max-loaded-loras {spec.max_cpu_loras}" in given
    assert "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj lm_head" in given
    assert f"--context-length {spec.max_model_len}" in given
    assert "secret" not in f"{entry} {given}"  # others read command lines
    environment = SGLANG.environment(spec, 0, "lo", {})
    assert (environment[TOKEN], environment["SGLANG_RETURN_ORIGINAL_LOGPROB"]) == ("secret", "1")


def test_tools_are_read_by_the_parser_that_is_set(facts: BaseModelFacts, tmp_path: Path) -> None:
    spec = replace(spec_of(facts, tmp_path), engine=SGLANG)
    assert not [flag for flag in SGLANG.command(spec, 81, "127.0.0.1") if "tool-" in flag]
    given = " ".join(SGLANG.command(replace(spec, tool_parser="hermes"), 81, "127.0.0.1"))
    assert "--tool-call-parser hermes" in given
    assert SGLANG.environment(spec, 0, "lo", {})["SGLANG_FORWARD_UNKNOWN_TOOLS"] == "1"


@pytest.mark.parametrize("name", ["glm47", "kimi_k3", "llama3_json"])
def test_another_parser_of_tools_is_refused_by_name(facts: BaseModelFacts, name: str) -> None:
    settings = {"base_model": facts.directory, "sampler_engine": "sglang"}
    with pytest.raises(StartupError, match=f"tool_parser: found {name}, expected one of hermes, llama3"):
        resolve(config.load(**settings, tool_parser=name))
    resolve(config.load(**settings, tool_parser="hermes"))


def test_a_server_of_full_parameters_alone_takes_no_adapters(facts: BaseModelFacts, tmp_path: Path) -> None:
    spec = replace(spec_of(facts, tmp_path), max_lora_rank=0, engine=SGLANG)
    assert not [
        flag for flag in SGLANG.command(spec, 81, "127.0.0.1") if "loras" in flag or "enable-lora" in flag
    ]


@pytest.mark.parametrize("keeps_cache", [False, True])
def test_on_a_gpu_no_step_is_under_way_where_samples_stand_in_place(
    facts: BaseModelFacts, tmp_path: Path, keeps_cache: bool
) -> None:
    spec = replace(spec_of(facts, tmp_path), device="cuda", keeps_cache=keeps_cache, engine=SGLANG)
    assert ("--disable-overlap-schedule" in SGLANG.command(spec, 81, "127.0.0.1")) == keeps_cache


def _check(settings: config.Settings) -> None:
    preflight.check_settings(settings)
    preflight.check_placement(settings)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"router_replay": True}, "router_replay"),
        ({"reasoning_parser": "qwen3"}, "reasoning_parser"),
        ({"sampled_logprobs": "processed"}, "processed_logprobs"),
        ({"prefill_urls": ("http://a:1",), "decode_urls": ("http://b:1",)}, "prefill_urls"),
        ({"sampler_urls": ("http://a:1",), "router_url": "http://b:1"}, "router_url"),
        ({"placement": "colocated"}, "colocated"),
        ({"ray_address": "auto"}, "ray_address"),
    ],
)
def test_settings_that_it_does_not_serve_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, object], name: str
) -> None:
    monkeypatch.setattr(SglangProcess, "check", lambda *_: None)  # for its interpreter
    settings = config.load(sampler_engine="sglang", **given)  # type: ignore[arg-type]
    with pytest.raises(StartupError, match=f"^{name} is not supported by .* engine, SGLang"):
        _check(settings)


def test_an_interpreter_without_its_release_is_refused(tmp_path: Path) -> None:
    for content, found in (("exit 1", "none"), ("echo 0.5.1", "0.5.1")):
        python = tmp_path / found
        python.write_text(f"#!/bin/sh\n{content}\n")
        python.chmod(0o755)
        settings = config.load(sampler_engine="sglang", sampler_python=python)
        with pytest.raises(StartupError, match=rf"found sglang {found} .* expected 0\.5\.23"):
            preflight.check_settings(settings)
    with pytest.raises(StartupError, match=r"sampler_python: .*nowhere"):
        SglangProcess(tmp_path / "nowhere").check()


def test_servers_that_run_already_need_no_interpreter_here() -> None:
    urls = ("http://a:1",)
    preflight.check_settings(config.load(sampler_engine="sglang", sampler_urls=urls))
    given = config.load(sampler_engine="sglang", sampler_urls=urls, sampler_python=Path("/env/python"))
    with pytest.raises(StartupError, match="sampler_python and sampler_urls: start the servers with"):
        preflight.check_settings(given)


def test_an_interpreter_for_the_other_engine_is_refused() -> None:
    with pytest.raises(StartupError, match="sampler_python: found sampler_engine vllm, expected sglang"):
        preflight.check_settings(config.load(sampler_python=Path("/env/python")))


PYTHON = Path("/env/python")


@pytest.mark.parametrize(
    ("given", "bases"),
    [
        ({}, {"A": {"sampler_engine": "sglang", "sampler_python": PYTHON}}),
        ({"sampler_python": PYTHON}, {"A": {"sampler_engine": "sglang"}}),
        ({"sampler_engine": "sglang", "sampler_python": PYTHON}, {"A": {"sampler_engine": "vllm"}}),
        ({"sampler_engine": "sglang", "sampler_python": PYTHON}, {"A": {"sampler_urls": ["http://a:1"]}}),
    ],
)
def test_one_interpreter_is_for_all_base_models_that_it_samples(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, object], bases: dict[str, object]
) -> None:
    asked: list[Path | None] = []
    monkeypatch.setattr(SglangProcess, "check", lambda process: asked.append(process.python))
    _check(config.load(**given, bases=bases))  # type: ignore[arg-type]
    assert asked == [PYTHON]


@pytest.mark.parametrize(
    ("given", "own", "message"),
    [
        ({}, {"sampler_python": PYTHON}, r"^bases\.A: sampler_python: found sampler_engine vllm, expected"),
        ({"sampler_python": PYTHON}, {}, "^sampler_python: found sampler_engine vllm, expected sglang"),
        (
            {"sampler_python": PYTHON, "sampler_engine": "sglang", "sampler_urls": ["http://b:1"]},
            {"sampler_engine": "vllm"},
            "^sampler_python and sampler_urls: start the servers",
        ),
        (
            {"sampler_engine": "sglang"},
            {"sampler_urls": ["http://a:1"], "sampler_python": PYTHON},
            r"^bases\.A: sampler_python and sampler_urls: start the servers",
        ),
        ({}, {"sampler_engine": "sglang", "reasoning_parser": "a"}, r"^bases\.A: reasoning_parser is not"),
        ({"sampled_logprobs": "processed"}, {"sampler_engine": "sglang"}, r"^bases\.A: processed_logprobs"),
        ({"weight_transport": "shared_memory"}, {"sampler_engine": "sglang"}, r"^bases\.A: weight_transport"),
        ({"weight_transport": "shared_memory", "sampler_engine": "sglang"}, {}, "^weight_transport shared"),
    ],
)
def test_a_base_model_is_refused_by_its_own_engine(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, object], own: dict[str, object], message: str
) -> None:
    monkeypatch.setattr(SglangProcess, "check", lambda *_: None)
    with pytest.raises(StartupError, match=message):
        _check(config.load(**given, bases={"A": own}))  # type: ignore[arg-type]


def test_what_a_base_models_engine_lacks_is_told_of_it_alone(facts: BaseModelFacts, tmp_path: Path) -> None:
    own = {facts.directory: {"sampler_engine": "sglang"}}
    first, second = catalog.resolve_all(config.load(home=tmp_path, bases=own)).all
    assert (str(first.sampler), second.sampler) == ("vLLM", SGLANG.abilities)


def test_arguments_of_vllm_are_refused() -> None:
    with pytest.raises(StartupError, match="vllm_args: found max-num-seqs, expected none with SGLang"):
        preflight.check_settings(config.load(sampler_engine="sglang", vllm_args={"max-num-seqs": 1}))


def test_models_that_were_not_tried_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "model", tied=False, arch="olmo3")
    with pytest.raises(StartupError, match=r"found Olmo3ForCausalLM, expected .*, Qwen3ForCausalLM"):
        resolve(config.load(base_model=str(tmp_path / "model"), sampler_engine="sglang"))


@pytest.mark.parametrize(
    ("arch", "given"),
    [("qwen3", {"use_sliding_window": True, "max_window_layers": 0}), ("qwen2", {}), ("mistral", {})],
)
def test_a_window_that_it_would_ignore_is_refused(
    tmp_path: Path, arch: str, given: dict[str, object]
) -> None:
    write_tiny(tmp_path, arch=arch, **{**given, "sliding_window": 64})
    settings = {"base_model": str(tmp_path), "sampler_engine": "sglang"}
    with pytest.raises(StartupError, match="sliding_window: found 64, expected null, or context_length"):
        resolve(config.load(**settings, context_length=65))
    resolve(config.load(**settings, context_length=64))


@pytest.mark.parametrize("arch", ["gemma3", "qwen3-moe"])
def test_adapters_with_which_it_does_not_start_are_refused(tmp_path: Path, arch: str) -> None:
    write_tiny(tmp_path, arch=arch, tied=arch == "gemma3")
    settings = {"base_model": str(tmp_path), "sampler_engine": "sglang"}
    with pytest.raises(StartupError, match=f"max_lora_rank: expected 0: .* of {FAMILIES[arch].architecture}"):
        resolve(config.load(**settings))
    resolve(config.load(**settings, max_lora_rank=0))


def test_a_tied_head_that_it_would_not_load_is_refused(tmp_path: Path) -> None:
    write_tiny(tmp_path, arch="qwen3-moe", tied=True)
    with pytest.raises(StartupError, match="tie_word_embeddings: expected false"):
        resolve(config.load(base_model=str(tmp_path), sampler_engine="sglang", max_lora_rank=0))


def test_ends_of_which_the_samples_know_nothing_are_refused(facts: BaseModelFacts) -> None:
    generation = Path(facts.directory, "generation_config.json")
    generation.write_text('{"eos_token_id": [7]}')
    with pytest.raises(StartupError, match=r"eos_token_id: expected also \[.*2\], of config.json"):
        resolve(config.load(base_model=facts.directory, sampler_engine="sglang"))


def test_the_end_of_the_tokenizer_is_one(facts: BaseModelFacts) -> None:
    base_model = facts.directory
    assert resolve(config.load(base_model=base_model, sampler_engine="sglang"))
    tokenizer = json.loads(Path(base_model, "tokenizer.json").read_text())
    other = next(each for each in tokenizer["added_tokens"] if each["id"] not in facts.eos_token_ids)
    given = {"eos_token": {"content": other["content"]}}
    Path(base_model, "tokenizer_config.json").write_text(json.dumps(given))
    with pytest.raises(StartupError, match=rf"expected also \[{other['id']}\]"):
        resolve(config.load(base_model=base_model, sampler_engine="sglang"))

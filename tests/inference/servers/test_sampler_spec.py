"""Memory and flags of a replica, from its specification alone."""

import json
from dataclasses import replace

import pytest

from skyrl_tinker.domain.values import BaseModelFacts, Gpu
from skyrl_tinker.engine.sampler.sampler_driver import CONCURRENCY
from skyrl_tinker.errors import StartupError
from skyrl_tinker.inference.constants import RESERVED_SEQUENCES
from skyrl_tinker.inference.servers.replica_spec import SamplerSpec
from skyrl_tinker.inference.sglang import sglang_process
from skyrl_tinker.inference.vllm.vllm_arguments import check
from skyrl_tinker.inference.vllm.vllm_process import VllmProcess, flags

FACTS = BaseModelFacts("/nowhere", ("tiny",), "Qwen3ForCausalLM", 512, 128, 2, 1, 64, 64, True, (0,))
SPEC = SamplerSpec(FACTS, "cpu", "float32", 8, 1, 1, "/nowhere", 1.0, engine=VllmProcess())


ON_GPU = replace(SPEC, device="cuda", dtype="bfloat16")


def value_of(given: list[str], flag: str) -> str:
    assert given.count(flag) == 1, flag
    return given[given.index(flag) + 1]


def test_vllm_reads_the_same_files_of_a_model_as_the_trainer() -> None:
    given = flags(SPEC, 1)
    assert {value_of(given, f"--{name}") for name in ("load-format", "config-format", "tokenizer-mode")} == {
        "hf"
    }


def test_arguments_of_vllm_are_added_or_take_the_place_of_defaults() -> None:
    given = flags(replace(ON_GPU, engine=VllmProcess({"max-num-seqs": 512, "quantization": "fp8"})), 1)
    assert value_of(given, "--max-num-seqs") == "512"
    assert value_of(given, "--quantization") == "fp8"
    assert value_of(flags(ON_GPU, 1), "--max-num-seqs") == "320"


def test_a_sampler_decodes_all_that_it_may_get_and_the_reserve() -> None:
    """Beyond it a newcomer's sample would wait for the longest of another session's."""
    for spec, alone in (SPEC, 384), (ON_GPU, 256):
        assert CONCURRENCY[spec.device].alone == alone
        most = alone + RESERVED_SEQUENCES
        assert int(value_of(flags(spec, 1), "--max-num-seqs")) == most
        assert int(value_of(sglang_process.flags(spec, 1, "lo"), "--max-running-requests")) == most


def test_no_clients_schema_chooses_the_grammars_of_all() -> None:
    assert value_of(flags(ON_GPU, 1), "--structured-outputs-config") == '{"backend": "xgrammar"}'


def test_samplers_of_full_parameters_alone_take_no_adapters() -> None:
    assert "--enable-lora" in flags(ON_GPU, 1)
    assert [name for name in flags(replace(ON_GPU, max_lora_rank=0), 1) if "lora" in name] == []


def test_the_head_is_computed_in_float32_beside_what_a_user_overrides() -> None:
    """As the trainer's: rounded to bfloat16, a logit of 30 would be off by up to 0.06."""
    half = replace(ON_GPU, dtype="bfloat16")
    assert value_of(flags(half, 1), "--hf-overrides") == '{"head_dtype": "float32"}'
    given = flags(replace(half, engine=VllmProcess({"hf-overrides": {"rope_theta": 1e6}})), 1)
    assert json.loads(value_of(given, "--hf-overrides")) == {"head_dtype": "float32", "rope_theta": 1e6}
    given = flags(replace(half, engine=VllmProcess({"hf-overrides": {"head_dtype": "model"}})), 1)
    assert json.loads(value_of(given, "--hf-overrides")) == {"head_dtype": "model"}
    assert "--hf-overrides" not in flags(replace(ON_GPU, dtype="float32"), 1)


def test_experts_are_listed_for_router_replay_alone() -> None:
    assert "--enable-return-routed-experts" in flags(replace(SPEC, router_replay=True), 1)
    assert "--enable-return-routed-experts" not in flags(SPEC, 1)
    with pytest.raises(StartupError, match="follows from the setting router_replay"):
        check({"enable-return-routed-experts": True})


def test_arguments_are_switches_lists_or_json() -> None:
    arguments = {
        "enable-expert-parallel": True,
        "enable-prefix-caching": False,
        "disable-log-stats": False,  # vLLM has no opposite of it
        "disable-uvicorn-access-log": False,  # a switch of ours
        "kv-offloading-size": 1.5,
        "kv-cache-dtype-skip-layers": ["0", "1"],
        "compilation-config": {"mode": 3},
    }
    given = flags(replace(ON_GPU, engine=VllmProcess(arguments)), 1)
    assert "--enable-expert-parallel" in given
    assert "--no-enable-prefix-caching" in given
    assert not any("log-stats" in flag or "access-log" in flag for flag in given)
    assert value_of(given, "--kv-offloading-size") == "1.5"
    assert value_of(given, "--compilation-config") == '{"mode": 3}'
    skipped = given.index("--kv-cache-dtype-skip-layers")
    assert given[skipped + 1 : skipped + 3] == ["0", "1"]
    assert "--enforce-eager" not in flags(replace(SPEC, engine=VllmProcess({"enforce-eager": False})), 1)


def test_what_every_server_needs_cannot_be_given() -> None:
    """However vLLM lets it be written."""
    defaults = {"max-num-seqs", "disable-uvicorn-access-log", "no-log-error-stack"}
    defaults |= {"enforce-eager", "kv-cache-memory-bytes", "disable-log-stats", "hf-overrides"}
    defaults |= {"structured-outputs-config"}
    shared = replace(ON_GPU, shared_gpus=(Gpu("node", "0"),), token="t", reasoning_parser="qwen3")
    for spec in (SPEC, shared):
        ours = {flag.removeprefix("--") for flag in flags(spec, 1) if flag.startswith("--")} - defaults
        for name in ours:
            with pytest.raises(StartupError, match=f"vllm_args: {name} cannot be given"):
                check({name: 1})
    for name in (
        "weight-transfer-config.backend",
        "tool-strict-level",
        "por",
        "lora-target-modules",
        "no-enable-lora",
        "max_model_len",
        "--host",
        "O 3",
    ):
        with pytest.raises(StartupError, match=f"vllm_args: .*{name}"):
            check({name: 1})
    check({name: True for name in defaults if not name.startswith("no-")})


def test_a_replica_takes_a_gpu_for_each_of_its_workers() -> None:
    spec = replace(ON_GPU, tensor_parallel_size=2, engine=VllmProcess({"data-parallel-size": 3}))
    assert spec.workers == 6
    gpus = tuple(Gpu("node", str(index)) for index in range(12))
    assert replace(spec, shared_gpus=gpus, replicas=2).gpus_of(1) == gpus[6:]
    for size in (0, -1, 1.5, "2"):
        with pytest.raises(StartupError, match="expected a positive integer"):
            check({"data-parallel-size": size})

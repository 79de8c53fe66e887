"""Real vLLM servers, and a plain Hugging Face reference. Nothing here imports vllm."""

import hashlib
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save
from transformers import AutoModelForCausalLM, PreTrainedModel

from skyrl_tinker import config
from skyrl_tinker.domain.peft_config import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    ALPHA,
    adapter_config,
    expert_rank,
)
from skyrl_tinker.domain.samples import SampleOutput, SampleRequest, SamplingParams
from skyrl_tinker.domain.values import BaseModelFacts, LoraSpec
from skyrl_tinker.engine.sampler.sample_call import SampleCall
from skyrl_tinker.inference.client.remote_client import RemoteInferenceClient
from skyrl_tinker.inference.servers.replica_spec import SamplerSpec
from skyrl_tinker.inference.servers.server_group import ServerGroup
from skyrl_tinker.inference.vllm.vllm_process import VllmProcess
from skyrl_tinker.server.base_models.base_model import resolve
from tests.support.sampler_clients import vllm_client
from tests.support.tiny_models import write_tiny

CONTEXT = 256
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class Served:
    """Running replicas and the directory of their base model."""

    facts: BaseModelFacts
    group: ServerGroup


@dataclass
class FixedLeases:
    """Leases of one model, which the test keeps loaded."""

    model: str

    def open(self, source: object) -> AbstractAsyncContextManager[str]:
        return nullcontext(self.model)

    def cache_fields(self) -> Mapping[str, str]:
        return {}


async def sample(
    client: RemoteInferenceClient,
    leases: str | FixedLeases,
    request: SampleRequest,
    *,
    session_key: str = "test",
    eos: tuple[int, ...] = (),
    tag: str | None = None,
) -> SampleOutput:
    """Sample as the engine does, from a model or from what `leases` give."""
    given: Any = FixedLeases(leases) if isinstance(leases, str) else leases
    return await SampleCall(client.data, given, None, session_key, eos, CONTEXT, tag).execute(request)


@dataclass
class Sampler:
    client: RemoteInferenceClient
    facts: BaseModelFacts

    async def __call__(
        self, leases: str | FixedLeases, request: SampleRequest, tag: str | None = None
    ) -> SampleOutput:
        return await sample(self.client, leases, request, eos=self.facts.eos_token_ids, tag=tag)


def write_model(
    directory: Path, *, tied: bool, seed: int = 0, arch: str = "qwen3", vocab: int = 512
) -> BaseModelFacts:
    write_tiny(directory, arch=arch, tied=tied, seed=seed, vocab=vocab)
    return resolve(config.load(base_model=str(directory), model_name="tiny", context_length=CONTEXT))


def load_weights(directory: Path) -> dict[str, np.ndarray]:
    return load_file(directory / "model.safetensors")


def spec_of(facts: BaseModelFacts, log_dir: Path) -> SamplerSpec:
    return SamplerSpec(
        model=facts,
        device="cpu",
        dtype="float32",
        max_lora_rank=16,
        max_loras=4,
        max_cpu_loras=8,
        log_dir=str(log_dir),
        startup_s=480.0,
        engine=VllmProcess(),
    )


def launch(root: Path, name: str, **given: Any) -> Served:
    """Two replicas of the tied model, one of the untied. `given`: other fields of SamplerSpec."""
    facts = write_model(root / name, tied=name == "tied")
    spec = replace(spec_of(facts, root / f"{name}-logs"), replicas=2 if name == "tied" else 1, **given)
    return Served(facts, ServerGroup.launch(spec))


@pytest.fixture(params=["untied", "tied"])
async def each_sampler(request: pytest.FixtureRequest, servers: dict[str, Served]) -> AsyncIterator[Sampler]:
    sampler = make_sampler(servers[request.param])
    yield sampler
    await sampler.client.close()


@pytest.fixture
async def sampler(servers: dict[str, Served]) -> AsyncIterator[Sampler]:
    sampler = make_sampler(servers["untied"])
    yield sampler
    await sampler.client.close()


def make_sampler(served: Served) -> Sampler:
    urls = served.group.urls
    return Sampler(vllm_client(urls[0], urls), served.facts)


def ask(prompt: tuple[int, ...], *, num_samples: int = 1, **given: Any) -> SampleRequest:
    """`given`: fields of SampleRequest and of its SamplingParams."""
    scores = {field.name: given.pop(field.name) for field in fields(SampleRequest) if field.name in given}
    params = replace(SamplingParams(max_tokens=8, stop=()), **given)
    return SampleRequest(prompt, num_samples, params, **scores)


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng(seed).integers(3, 500, length))


@dataclass(frozen=True)
class AdapterWeights:
    """A LoRA adapter by PEFT's names, float32."""

    spec: LoraSpec
    tensors: Mapping[str, np.ndarray]


def publish_adapter(adapter: AdapterWeights, directory: Path, base_model: str) -> None:
    directory.mkdir(parents=True)
    (directory / ADAPTER_FILE).write_bytes(save(dict(adapter.tensors), metadata={"format": "pt"}))
    shapes = {name: tensor.shape for name, tensor in adapter.tensors.items()}
    rank = adapter.spec.rank
    config = adapter_config(shapes, rank, base_model, expert_rank(shapes, rank))
    (directory / ADAPTER_CONFIG_FILE).write_text(json.dumps(config))


# The reference: plain Hugging Face in float32.


def reference(directory: str | Path, adapter: AdapterWeights | None = None) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    if adapter is not None:
        _merge(model, adapter)
    return model


def _merge(model: PreTrainedModel, adapter: AdapterWeights) -> None:
    """W += ALPHA / rank * B A. lm_head gets its own matrix, also where embeddings are tied."""
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    for name, a in adapter.tensors.items():
        if ".lora_A." not in name:
            continue
        b = adapter.tensors[name.replace("lora_A", "lora_B")]
        module = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
        module.weight.data += torch.from_numpy(b @ a) * (ALPHA / adapter.spec.rank)


@torch.no_grad()
def target_logprobs(model: PreTrainedModel, tokens: tuple[int, ...]) -> np.ndarray:
    """[len(tokens) - 1]: of each token after the first."""
    logits = model(torch.tensor([tokens])).logits[0, :-1]
    targets = torch.tensor(tokens[1:]).unsqueeze(1)
    return torch.log_softmax(logits, -1).gather(1, targets)[:, 0].numpy()


@torch.no_grad()
def all_logprobs(model: PreTrainedModel, tokens: tuple[int, ...]) -> torch.Tensor:
    """[len(tokens) - 1, vocabulary]: row i is of what may follow tokens[: i + 1]."""
    return torch.log_softmax(model(torch.tensor([tokens])).logits[0, :-1], -1)


def assert_same_logprobs(output: SampleOutput, model: PreTrainedModel, prompt: tuple[int, ...]) -> None:
    for sequence in output.sequences:
        expected = target_logprobs(model, prompt + sequence.tokens)[len(prompt) - 1 :]
        np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-3)


def random_adapter(directory: str | Path, rank: int, seed: int, *, unembed: bool = True) -> AdapterWeights:
    generator = np.random.default_rng(seed)
    tensors = {}
    for name, weight in _adapted(Path(directory), unembed=unembed):
        prefix = f"base_model.model.{name}"
        for part, shape in (("A", (rank, weight[1])), ("B", (weight[0], rank))):
            values = generator.normal(0, 0.05, shape).astype(np.float32)
            tensors[f"{prefix}.lora_{part}.weight"] = values
    return AdapterWeights(LoraSpec(rank=rank, seed=seed), tensors)


def _adapted(directory: Path, *, unembed: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    weights = load_weights(directory)
    for name, weight in weights.items():
        if name.split(".")[-2] in MODULES:
            yield name.removesuffix(".weight"), weight.shape
    if unembed:
        yield "lm_head", weights["model.embed_tokens.weight"].shape


async def publish_and_load(sampler: Sampler, adapter: AdapterWeights, root: Path, name: str) -> None:
    publish_adapter(adapter, root / name, sampler.facts.directory)
    await sampler.client.control.load_adapter(name, str(root / name))


def unique(tmp_path: Path) -> str:
    """An adapter name that no other test uses."""
    return "v" + hashlib.sha256(str(tmp_path).encode()).hexdigest()[:8]

"""A running mixture of experts, and adapters of its experts."""

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from skyrl_tinker.domain.peft_config import ALPHA
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.inference.servers.server_group import ServerGroup
from skyrl_tinker.inference.vllm.vllm_process import VllmProcess
from tests.inference.support.samplers import AdapterWeights, Served, load_weights, spec_of, write_model

TOP_K = 2
ATTENTION, EXPERTS = "self_attn", "mlp.experts"


@pytest.fixture(scope="session")
def mixture(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One replica, of which a batch holds two adapters and 96 tokens, and which lists experts."""
    root = tmp_path_factory.mktemp("experts")
    facts = write_model(root / "model", tied=False, arch="qwen3-moe")
    spec = replace(
        spec_of(facts, root / "logs"),
        max_loras=2,
        router_replay=True,
        engine=VllmProcess({"max-num-batched-tokens": 96, "max-num-seqs": 32}),
    )
    served = Served(facts, ServerGroup.launch(spec))
    asyncio.run(served.group.ready())
    yield served
    asyncio.run(served.group.shutdown())


def expert_adapter(base: Path, rank: int, seed: int, *parts: str) -> AdapterWeights:
    """Adapt the matrices of these parts; experts at rank // TOP_K, but at least 1."""
    generator = np.random.default_rng(seed)
    tensors = {}
    for name, weight in load_weights(base).items():
        if weight.ndim < 2 or not any(part in name for part in parts):
            continue
        own = max(1, rank // TOP_K) if EXPERTS in name else rank
        for matrix, shape in (("A", (own, weight.shape[1])), ("B", (weight.shape[0], own))):
            key = f"base_model.model.{name.removesuffix('.weight')}.lora_{matrix}.weight"
            tensors[key] = generator.normal(0, 0.1, shape).astype(np.float32)
    return AdapterWeights(LoraSpec(rank=rank, seed=seed), tensors)


def write_merged(base: Path, directory: Path, adapter: AdapterWeights) -> Path:
    """Write the model with W + ALPHA / rank * B A."""
    weights = load_weights(base)
    for name, a in adapter.tensors.items():
        if ".lora_A." in name:
            b = adapter.tensors[name.replace("lora_A", "lora_B")]
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            weights[f"{module}.weight"] += ALPHA / adapter.spec.rank * (b @ a)
    directory.mkdir()
    shutil.copy(base / "config.json", directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory

"""vLLM samples every family with the trainer's logprobs: the base, adapters and full parameters."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from skyrl_tinker.domain.samples import SampleOutput
from skyrl_tinker.domain.values import AdamParams, Datum, LoraSpec
from skyrl_tinker.inference.servers.server_group import ServerGroup
from skyrl_tinker.server.base_models.tiny_families import FAMILIES
from skyrl_tinker.training.worker import Worker
from skyrl_tinker.weight_sync.shared_memory import SharedMemoryTransport
from skyrl_tinker.weight_sync.sync import sync_weights
from skyrl_tinker.weight_sync.transport import WeightTransport
from tests.inference.support.samplers import (
    Sampler,
    Served,
    ask,
    make_sampler,
    prompt_of,
    spec_of,
    write_model,
)
from tests.training.conftest import MakeWorker
from tests.training.support.passes import make_data, make_item, run_one, step
from tests.training.support.saves import write_weights

pytestmark = pytest.mark.long

ARCHS = sorted(FAMILIES.keys() - {"qwen3"})  # which all other tests sample
UNTIED = ("llama",)
BASE, LORA, FULL = 1, 2, 3
SHARED_MEMORY = SharedMemoryTransport(100_000)
PROMPT = prompt_of(200)  # many windows, and more than a block of the KV cache


@pytest.fixture(scope="module")
def served(
    ray_cluster: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Server of one family, `request.param`."""
    root = tmp_path_factory.mktemp(request.param)
    facts = write_model(root / "model", tied=request.param not in UNTIED, arch=request.param)
    served = Served(facts, ServerGroup.launch(spec_of(facts, root / "logs")))
    asyncio.run(served.group.ready())
    yield served
    asyncio.run(served.group.shutdown())


@pytest.mark.parametrize("served", ARCHS, indirect=True)
async def test_samples_have_the_trainers_logprobs(
    served: Served, make_worker: MakeWorker, tmp_path: Path
) -> None:
    await assert_all_sampled(make_sampler(served), SHARED_MEMORY, make_worker, tmp_path)


async def assert_all_sampled(
    sampler: Sampler,
    transport: WeightTransport,
    make_worker: MakeWorker,
    tmp_path: Path,
    *,
    adapters: bool = True,
) -> None:
    """Sample the base, an adapter and, after a weight sync, full parameters of a trainer's worker."""
    base = sampler.facts.directory
    specs = {BASE: LoraSpec(0, 0), LORA: LoraSpec(8, 1), FULL: LoraSpec(0, 0)}
    worker = make_worker(base, models=specs)
    for model in (LORA, FULL):
        # Not the model's number as the seed: with it a router's second and third are 2e-7 apart.
        run_one(worker, make_item(model, make_data((100, 30), 10 + model)))
        step(worker, model, AdamParams(1e-2))
    write_weights(worker, LORA, tmp_path / "adapter")
    write_weights(worker, FULL, tmp_path / "full")
    assert np.abs(_logprobs(worker, LORA) - _logprobs(worker, BASE)).max() > 0.1
    assert np.abs(_logprobs(worker, FULL) - _logprobs(worker, BASE)).max() > 0.1

    models = {"base": BASE, "adapter": LORA} if adapters else {"base": BASE}
    if adapters:
        await sampler.client.control.load_adapter("adapter", str(tmp_path / "adapter"))
    await assert_sampled(sampler, worker, PROMPT, **models)
    await _sync(sampler, transport, tmp_path / "full")
    await assert_sampled(sampler, worker, PROMPT, base=FULL)
    await _sync(sampler, transport, Path(base))
    await assert_sampled(sampler, worker, PROMPT, **models)
    await sampler.client.close()


@pytest.mark.parametrize("served", ["gpt-oss"], indirect=True)
async def test_new_weights_reach_every_parameter_of_gpt_oss(
    served: Served, make_worker: MakeWorker, tmp_path: Path
) -> None:
    """Sinks and biases too, of which a step changes little."""
    sampler = make_sampler(served)
    directory = _other_model(Path(sampler.facts.directory), tmp_path / "other")
    worker = make_worker(directory, models={BASE: LoraSpec(0, 0)})
    await _sync(sampler, SHARED_MEMORY, tmp_path / "other")
    await assert_sampled(sampler, worker, PROMPT, base=BASE)
    await _sync(sampler, SHARED_MEMORY, Path(sampler.facts.directory))
    await sampler.client.close()


def _other_model(base: Path, directory: Path) -> str:
    """Write the model with other sinks, biases, norms and experts."""
    shutil.copytree(base, directory)
    rng = np.random.default_rng(1)
    tensors = {
        name: value + rng.normal(0, 0.3, value.shape).astype(np.float32)
        for name, value in load_file(base / "model.safetensors").items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return str(directory)


async def _sync(sampler: Sampler, transport: WeightTransport, directory: Path) -> None:
    await sync_weights(sampler.client.control, transport, directory, directory.name)


async def assert_sampled(sampler: Sampler, worker: Worker, prompt: tuple[int, ...], **models: int) -> None:
    """In one batch. `models`: the trainer's, by the sampler's name."""
    request = ask(prompt, num_samples=2, max_tokens=24, prompt_logprobs=True)
    outputs: list[SampleOutput] = await asyncio.gather(*(sampler(name, request) for name in models))
    for output, model in zip(outputs, models.values(), strict=True):
        assert output.prompt_logprobs is not None
        for sequence in output.sequences:
            found = [*output.prompt_logprobs[1:], *sequence.logprobs]
            expected = _logprobs(worker, model, prompt + sequence.tokens)
            np.testing.assert_allclose(found, expected, atol=1e-3)


def _logprobs(worker: Worker, model: int, tokens: tuple[int, ...] = PROMPT) -> np.ndarray:
    inputs = {"weights": np.ones(len(tokens) - 1, np.float32)}
    datum = Datum(np.array(tokens[:-1], np.int32), np.array(tokens[1:]), inputs)
    return run_one(worker, make_item(model, (datum,), backward=False)).logprobs[0]

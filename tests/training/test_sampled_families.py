"""vLLM samples every family with the trainer's logprobs: the base, adapters and full parameters."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import AdamParams, Datum, LoraSpec, SampleOutput
from skyrl_tinker.inference.servers.server_group import ServerGroup
from skyrl_tinker.server.tiny_families import FAMILIES
from skyrl_tinker.training.worker import Worker
from skyrl_tinker.weight_sync.shared_memory import SharedMemoryTransport
from skyrl_tinker.weight_sync.sync import sync_weights
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
from tests.training.support.passes import make_data, make_item, perturb, run_one, step
from tests.training.support.saves import write_weights

ARCHS = sorted(FAMILIES.keys() - {"qwen3"})  # which all other tests sample
BASE, LORA, FULL = 1, 2, 3
PROMPT = prompt_of(200)  # many windows, and more than a block of the KV cache


@pytest.fixture(scope="module")
def running(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Served]]:
    """One server of each, started side by side."""
    root = tmp_path_factory.mktemp("families")
    every = {arch: write_model(root / arch, tied=arch != "llama", arch=arch) for arch in ARCHS}
    served = {
        arch: Served(facts, ServerGroup.launch(spec_of(facts, root / f"{arch}-logs")))
        for arch, facts in every.items()
    }
    for each in served.values():
        asyncio.run(each.group.ready())
    yield served
    for each in served.values():
        asyncio.run(each.group.shutdown())


@pytest.mark.parametrize("arch", ARCHS)
async def test_samples_have_the_trainers_logprobs(
    running: dict[str, Served], make_worker: MakeWorker, tmp_path: Path, arch: str
) -> None:
    await assert_all_sampled(running[arch], make_worker, tmp_path)


async def assert_all_sampled(served: Served, make_worker: MakeWorker, tmp_path: Path) -> None:
    """Sample the base, an adapter and, after a weight sync, full parameters of a trainer's worker."""
    sampler = make_sampler(served)
    base = sampler.facts.directory
    worker = make_worker(base)
    for model, spec in ((BASE, LoraSpec(0, 0)), (LORA, LoraSpec(8, 1)), (FULL, LoraSpec(0, 0))):
        worker.create_model(ModelKey(model), spec)
    perturb(worker, LORA)
    for model in (LORA, FULL):
        # Not the model's number as the seed: with it a router's second and third are 2e-7 apart.
        run_one(worker, make_item(model, make_data((100, 30), 10 + model)))
        step(worker, model, AdamParams(1e-2))
    write_weights(worker, LORA, tmp_path / "adapter")
    write_weights(worker, FULL, tmp_path / "full")
    assert np.abs(_logprobs(worker, LORA) - _logprobs(worker, BASE)).max() > 0.1
    assert np.abs(_logprobs(worker, FULL) - _logprobs(worker, BASE)).max() > 0.1

    await sampler.client.control.load_adapter("adapter", str(tmp_path / "adapter"))
    await assert_sampled(sampler, worker, PROMPT, base=BASE, adapter=LORA)
    await _sync(sampler, tmp_path / "full")
    await assert_sampled(sampler, worker, PROMPT, base=FULL)
    await _sync(sampler, Path(base))
    await assert_sampled(sampler, worker, PROMPT, base=BASE, adapter=LORA)
    await sampler.client.close()


async def _sync(sampler: Sampler, directory: Path) -> None:
    await sync_weights(sampler.client.control, SharedMemoryTransport(100_000), directory, directory.name)


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

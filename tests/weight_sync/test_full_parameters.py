"""Full parameters reach running servers whole or not at all."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from skyrl_tinker.errors import SamplerError
from skyrl_tinker.weight_sync.base import Message, sync_weights
from skyrl_tinker.weight_sync.shared_memory import SharedMemoryTransport
from tests.inference.samplers import (
    Sampler,
    ask,
    assert_same_logprobs,
    load_weights,
    prompt_of,
    publish_and_load,
    random_adapter,
    reference,
    unique,
    write_model,
)

TRANSPORT = SharedMemoryTransport()


@pytest.fixture
async def trained(each_sampler: Sampler, tmp_path: Path) -> Path:
    """Other weights of the same shape, in two chunks."""
    write_model(tmp_path / "trained", tied=each_sampler.facts.tied, seed=7)
    tensors = load_weights(tmp_path / "trained")
    names = sorted(tensors)
    write_chunks(
        tmp_path / "chunks", [{n: tensors[n] for n in names[:9]}, {n: tensors[n] for n in names[9:]}]
    )
    return tmp_path


def write_chunks(directory: Path, chunks: Sequence[dict[str, np.ndarray]]) -> None:
    directory.mkdir()
    for index, chunk in enumerate(chunks):
        save_file(chunk, directory / f"{index:05}.safetensors")


async def back_to_base(sampler: Sampler) -> None:
    await sync_weights(sampler.client, TRANSPORT, Path(sampler.facts.directory), "base")


async def test_synced_weights_are_served_exactly_and_the_base_comes_back(
    each_sampler: Sampler, trained: Path
) -> None:
    prompt = prompt_of(200)  # more than a KV block, so that a stale cache would show
    base = reference(each_sampler.facts.directory)
    assert_same_logprobs(await each_sampler("base", ask(prompt)), base, prompt)
    await sync_weights(each_sampler.client, TRANSPORT, trained / "chunks", "v7")
    assert await each_sampler.client.weight_version() == "v7"
    assert_same_logprobs(await each_sampler("base", ask(prompt)), reference(trained / "trained"), prompt)
    await back_to_base(each_sampler)
    assert_same_logprobs(await each_sampler("base", ask(prompt)), base, prompt)


async def test_adapters_and_base_are_exact_after_a_sync(each_sampler: Sampler, trained: Path) -> None:
    name, prompt = unique(trained), prompt_of(20)
    adapter = random_adapter(each_sampler.facts.directory, 8, seed=3)
    await publish_and_load(each_sampler, adapter, trained, name)
    await sync_weights(each_sampler.client, TRANSPORT, trained / "chunks", "v7")
    outputs = await asyncio.gather(*(each_sampler(model, ask(prompt)) for model in ("base", name)))
    assert_same_logprobs(outputs[0], reference(trained / "trained"), prompt)
    assert_same_logprobs(outputs[1], reference(trained / "trained", adapter), prompt)
    await back_to_base(each_sampler)


async def test_sampling_goes_on_during_a_sync(sampler: Sampler, tmp_path: Path) -> None:
    """A request in flight keeps its tokens and goes on with what the new weights say."""
    prompt = prompt_of(20)
    sampling = asyncio.create_task(sampler("base", ask(prompt, num_samples=4, max_tokens=200)))
    await asyncio.sleep(0.1)
    await sync_weights(sampler.client, TRANSPORT, Path(sampler.facts.directory), "same")
    assert_same_logprobs(await sampling, reference(sampler.facts.directory), prompt)


class Tampered(SharedMemoryTransport):
    """The transport with other messages."""

    def __init__(self, *messages: Message) -> None:
        super().__init__()
        self.__dict__["messages"] = messages

    def updates(self, directory: Path) -> Sequence[Message]:
        return tuple(self.__dict__["messages"])


async def assert_refused(sampler: Sampler, transport: object, directory: Path, match: str) -> None:
    before = await sampler.client.weight_version()
    with pytest.raises(SamplerError, match=match):
        await sync_weights(sampler.client, transport, directory, "broken")  # type: ignore[arg-type]
    prompt = prompt_of(20)
    assert_same_logprobs(await sampler("base", ask(prompt)), reference(sampler.facts.directory), prompt)
    assert await sampler.client.weight_version() == before


async def test_a_refused_update_leaves_the_old_weights_and_the_next_one_works(
    each_sampler: Sampler, trained: Path
) -> None:
    tensors = load_weights(trained / "trained")
    norm = tensors.pop("model.norm.weight")
    write_chunks(trained / "missing", [tensors])
    write_chunks(trained / "shape", [tensors | {"model.norm.weight": norm[:-1].copy()}])
    write_chunks(trained / "name", [tensors | {"model.norm.weight": norm, "model.other": norm}])
    (trained / "nothing").mkdir()
    half = str(trained / "chunks" / "00000.safetensors")

    await assert_refused(
        each_sampler, TRANSPORT, trained / "missing", "missing from the update, first model.norm"
    )
    await assert_refused(each_sampler, TRANSPORT, trained / "shape", "model.norm.weight: expected shape")
    await assert_refused(each_sampler, TRANSPORT, trained / "name", "model.other")
    await assert_refused(each_sampler, TRANSPORT, trained / "nothing", "no .*safetensors")
    await assert_refused(each_sampler, Tampered({"path": half}), trained, "missing")  # finish without `last`
    await assert_refused(each_sampler, Tampered({"path": "/nowhere"}), trained, "nowhere")

    await sync_weights(each_sampler.client, TRANSPORT, trained / "chunks", "v8")
    prompt = prompt_of(20)
    assert_same_logprobs(await each_sampler("base", ask(prompt)), reference(trained / "trained"), prompt)
    await back_to_base(each_sampler)

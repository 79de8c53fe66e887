"""Full parameters reach running servers whole or not at all."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from skyrl_tinker.errors import SamplerError
from skyrl_tinker.weight_sync.sync import Synced, sync_weights
from skyrl_tinker.weight_sync.transport import Message, WeightSyncError, WeightTransport
from tests.inference.support.samplers import (
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
from tests.support.shards import write_index


@pytest.fixture
async def trained(each_sampler: Sampler, tmp_path: Path) -> Path:
    """Other weights of the same shape, in two files."""
    write_model(tmp_path / "trained", tied=each_sampler.facts.tied, seed=7)
    tensors = load_weights(tmp_path / "trained")
    names = sorted(tensors)
    write_files(tmp_path / "two", [{n: tensors[n] for n in names[:9]}, {n: tensors[n] for n in names[9:]}])
    return tmp_path


def write_files(directory: Path, files: Sequence[dict[str, np.ndarray]]) -> None:
    directory.mkdir()
    for path, tensors in zip(write_index(directory, files), files, strict=True):
        save_file(tensors, path)


async def sync(sampler: Sampler, transport: WeightTransport, directory: Path, version: str) -> Synced:
    return await sync_weights(sampler.client.control, transport, directory, version)


async def back_to_base(sampler: Sampler, transport: WeightTransport) -> None:
    await sync(sampler, transport, Path(sampler.facts.directory), "base")


async def test_synced_weights_are_served_exactly_and_the_base_comes_back(
    each_sampler: Sampler, transport: WeightTransport, trained: Path
) -> None:
    prompt = prompt_of(200)  # more than a KV block, so that a stale cache would show
    base = reference(each_sampler.facts.directory)
    assert_same_logprobs(await each_sampler("base", ask(prompt)), base, prompt)
    synced = await sync(each_sampler, transport, trained / "two", "v7")
    assert await each_sampler.client.control.weight_version() == "v7"
    assert synced.size == sum(array.nbytes for array in load_weights(trained / "trained").values())
    assert 0 < synced.paused_s < synced.seconds
    assert_same_logprobs(await each_sampler("base", ask(prompt)), reference(trained / "trained"), prompt)
    await back_to_base(each_sampler, transport)
    assert_same_logprobs(await each_sampler("base", ask(prompt)), base, prompt)


async def test_adapters_and_base_are_exact_after_a_sync(
    each_sampler: Sampler, transport: WeightTransport, trained: Path
) -> None:
    name, prompt = unique(trained), prompt_of(20)
    adapter = random_adapter(each_sampler.facts.directory, 8, seed=3)
    await publish_and_load(each_sampler, adapter, trained, name)
    await sync(each_sampler, transport, trained / "two", "v7")
    outputs = await asyncio.gather(*(each_sampler(model, ask(prompt)) for model in ("base", name)))
    assert_same_logprobs(outputs[0], reference(trained / "trained"), prompt)
    assert_same_logprobs(outputs[1], reference(trained / "trained", adapter), prompt)
    await back_to_base(each_sampler, transport)


async def test_bfloat16_weights_are_served_as_they_are(
    sampler: Sampler, transport: WeightTransport, tmp_path: Path
) -> None:
    """A trainer computes in bfloat16 what a float32 sampler loads."""
    model = reference(sampler.facts.directory).bfloat16()
    model.save_pretrained(tmp_path / "bf16")
    await sync(sampler, transport, tmp_path / "bf16", "bf16")
    await assert_serves(sampler, tmp_path / "bf16")
    await back_to_base(sampler, transport)


async def assert_refused(sampler: Sampler, transport: WeightTransport, directory: Path, match: str) -> None:
    before = await sampler.client.control.weight_version()
    with pytest.raises(WeightSyncError, match=match) as caught:
        await sync(sampler, transport, directory, "broken")
    assert caught.value.lost == ()
    await assert_serves(sampler, sampler.facts.directory)
    assert await sampler.client.control.weight_version() == before


async def assert_serves(sampler: Sampler, directory: str | Path) -> None:
    prompt = prompt_of(20)
    assert_same_logprobs(await sampler("base", ask(prompt)), reference(directory), prompt)


async def test_a_refused_update_leaves_the_old_weights_and_the_next_one_works(
    each_sampler: Sampler, transport: WeightTransport, trained: Path
) -> None:
    tensors = load_weights(trained / "trained")
    norm = tensors.pop("model.norm.weight")
    write_files(trained / "missing", [tensors])
    write_files(trained / "shape", [tensors | {"model.norm.weight": norm[:-1].copy()}])
    write_files(trained / "name", [tensors | {"model.norm.weight": norm, "model.other": norm}])
    write_files(trained / "cut", [tensors])
    (cut,) = (trained / "cut").glob("*.safetensors")
    cut.write_bytes(cut.read_bytes()[:-100])
    (trained / "nothing").mkdir()
    refused = {
        "missing": r"update failed: .*missing from the update, first model\.norm",
        "shape": r"update failed: .*model\.norm\.weight: expected shape",
        "name": r"update failed: .*model\.other",
        "cut": r"open failed: .*00001-of-00001\.safetensors' is not a whole safetensors file",
        "nothing": r"open failed: .*no .*safetensors",
    }
    for directory, match in refused.items():
        await assert_refused(each_sampler, transport, trained / directory, match)

    await sync(each_sampler, transport, trained / "two", "v8")
    await assert_serves(each_sampler, trained / "trained")
    await back_to_base(each_sampler, transport)


async def test_half_an_update_is_never_applied(
    each_sampler: Sampler, transport: WeightTransport, trained: Path
) -> None:
    """Even when nothing says that part of it is missing."""
    load = transport.load

    async def never_last(index: int) -> Message:
        return {**await load(index), "last": False}

    write_files(
        trained / "half", [{"model.norm.weight": load_weights(trained / "trained")["model.norm.weight"]}]
    )
    transport.load = never_last  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match=r"finish failed: .*missing from the update") as caught:
        await sync(each_sampler, transport, trained / "half", "broken")
    assert caught.value.lost == each_sampler.client.server_urls
    with pytest.raises(SamplerError, match="discarded"):
        await each_sampler.client.control.update_weights({"discard": True})
    await each_sampler.client.control.resume()
    await assert_serves(each_sampler, each_sampler.facts.directory)


async def test_an_update_that_an_engine_left_when_it_died_is_discarded_by_the_next_one(
    each_sampler: Sampler, transport: WeightTransport, trained: Path
) -> None:
    await back_to_base(each_sampler, transport)
    await each_sampler.client.control.start_weight_update()
    await transport.leave()  # the next engine knows of no group
    await sync(each_sampler, transport, trained / "two", "v7")
    await assert_serves(each_sampler, trained / "trained")
    await back_to_base(each_sampler, transport)


async def test_a_file_that_is_cut_while_it_is_sent_leaves_the_old_weights(
    each_sampler: Sampler, transport: WeightTransport, trained: Path
) -> None:
    load, file = transport.load, trained / "two" / "model-00002-of-00002.safetensors"

    async def cut_then_load(index: int) -> Message:
        if index == 1:  # another file in its place: what is mapped already must not shrink
            file.rename(trained / "whole")
            file.write_bytes((trained / "whole").read_bytes()[:100])
        return await load(index)

    transport.load = cut_then_load  # type: ignore[method-assign]
    await assert_refused(each_sampler, transport, trained / "two", "update failed: ")

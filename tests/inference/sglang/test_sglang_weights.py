"""Full parameters reach a real SGLang over gloo; samples that run over an update go on with the new ones."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from skyrl_tinker.domain.samples import SampledSequence, VersionSpan
from skyrl_tinker.domain.values import BaseModelFacts, LoraSpec
from skyrl_tinker.inference.client.remote_client import RemoteInferenceClient
from skyrl_tinker.inference.constants import BASE_MODEL
from skyrl_tinker.inference.sglang.sglang_dialect import SGLANG
from skyrl_tinker.training.trainer_group import TrainerGroup
from skyrl_tinker.weight_sync.factory import make_transport
from skyrl_tinker.weight_sync.sync import PARTIAL, sync_weights
from skyrl_tinker.weight_sync.transport import WeightSource, WeightSyncError, WeightTransport
from tests.inference.client.test_sampling_port import LONG, PROMPT, facts, start  # noqa: F401
from tests.inference.support.samplers import Sampler, ask, reference, spec_of, target_logprobs, write_model
from tests.support.processes import title
from tests.support.sglang_cpu.sglang_server import interpreter, serving
from tests.weight_sync.conftest import CHUNK_BYTES, launch_trainer
from tests.weight_sync.test_full_parameters import (  # noqa: F401 - kept here as by vLLM
    test_adapters_and_base_are_exact_after_a_sync,
    test_bfloat16_weights_are_served_as_they_are,
    test_synced_weights_are_served_exactly_and_the_base_comes_back,
    trained,
)
from tests.weight_sync.test_in_flight import kept_logprobs
from tests.weight_sync.test_replicas import MODEL, killing, train

pytestmark = [pytest.mark.servers, pytest.mark.long]
ATOL = 1e-5
BEGUN_S = 0.3
"""Enough for some tokens, and not for all; where it was not, the test tries again."""


@pytest.fixture(scope="module")
def url(facts: BaseModelFacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:  # noqa: F811
    with serving(spec_of(facts, tmp_path_factory.mktemp("logs")), interpreter()) as url:
        yield url


@pytest.fixture(scope="module")
def trainer(ray_cluster: None, facts: BaseModelFacts) -> Iterator[TrainerGroup]:  # noqa: F811
    group = launch_trainer(facts, 2)
    yield group
    asyncio.run(group.shutdown())


@pytest.fixture
def transport(trainer: TrainerGroup) -> WeightTransport:
    return make_transport("torch_gloo", trainer, CHUNK_BYTES)


@pytest.fixture
async def sampler(url: str, facts: BaseModelFacts) -> AsyncIterator[Sampler]:  # noqa: F811
    client = RemoteInferenceClient(url, (url,), dialect=SGLANG)
    yield Sampler(client, facts)
    await client.close()


@pytest.fixture
def each_sampler(sampler: Sampler) -> Sampler:
    return sampler


async def bring(sampler: Sampler, transport: WeightTransport, source: WeightSource, version: str) -> None:
    await sync_weights(sampler.client.control, transport, source, version)


def of_the_weights(directory: Path, sequence: SampledSequence) -> np.ndarray:
    """[len(sequence.tokens)]: logprobs that these weights give them after PROMPT."""
    return target_logprobs(reference(directory), PROMPT + sequence.tokens)[len(PROMPT) - 1 :]


async def test_what_two_ranks_hold_is_served_while_they_train_on(
    sampler: Sampler, trainer: TrainerGroup, transport: WeightTransport, tmp_path: Path
) -> None:
    await trainer.create_model(MODEL, LoraSpec(0, 0))
    await train(trainer)
    captured = (await trainer.capture_weights({MODEL: False}))[MODEL]
    await asyncio.gather(bring(sampler, transport, captured, "v1"), train(trainer))
    await trainer.release(MODEL)
    await trainer.persist_state(captured, str(tmp_path / "v1"))
    await captured.drop()
    shutil.copy(Path(sampler.facts.directory) / "config.json", tmp_path / "v1")
    (sequence,) = (await sampler(BASE_MODEL, ask(PROMPT, max_tokens=32))).sequences
    assert sequence.versions == (VersionSpan("v1", 0, 32),)
    expected = of_the_weights(tmp_path / "v1", sequence)
    np.testing.assert_allclose(sequence.logprobs, expected, atol=ATOL, rtol=0)
    await bring(sampler, transport, Path(sampler.facts.directory), "base")


@pytest.mark.parametrize("keep_cache", [False, True])
async def test_a_sample_that_runs_over_an_update_has_the_versions_of_both(
    sampler: Sampler, transport: WeightTransport, tmp_path: Path, keep_cache: bool
) -> None:
    control = sampler.client.control
    old, new = Path(sampler.facts.directory), tmp_path / "new"
    write_model(new, tied=False, seed=3)
    await bring(sampler, transport, old, "base")
    place = 0
    while not 0 < place < LONG:
        sampling = await start(sampler, "running")
        await asyncio.sleep(BEGUN_S)
        await sync_weights(control, transport, new, "new", keep_cache=keep_cache)
        (first, _) = (await sampling).sequences  # type: ignore[attr-defined]
        await bring(sampler, transport, old, "base")
        place = first.versions[0].end if first.versions[0].version == "base" else 0
    assert first.versions == (VersionSpan("base", 0, place), VersionSpan("new", place, LONG))
    before, after = of_the_weights(old, first), of_the_weights(new, first)
    if keep_cache:
        computed_again, at = after, len(PROMPT) + place
        after = np.empty(LONG)
        after[place:] = kept_logprobs(reference(old), reference(new), PROMPT + first.tokens, at - 1)
        assert np.abs(after - computed_again)[place:].max() > 1e-3, "else the two could not be told apart"
    np.testing.assert_allclose(first.logprobs[:place], before[:place], atol=ATOL, rtol=0)
    np.testing.assert_allclose(first.logprobs[place:], after[place:], atol=ATOL, rtol=0)
    assert not np.isclose(first.logprobs[:place], of_the_weights(new, first)[:place], atol=ATOL).any()


async def test_weights_of_another_shape_are_refused_and_the_server_is_lost(
    sampler: Sampler, trainer: TrainerGroup, transport: WeightTransport, tmp_path: Path
) -> None:
    write_model(tmp_path / "other", tied=False, vocab=640)
    refused = "update failed: .*Failed to update parameter online"
    with pytest.raises(WeightSyncError, match=refused) as caught:
        await bring(sampler, transport, tmp_path / "other", "v1")
    assert caught.value.lost == sampler.client.server_urls
    await sampler.client.control.finish_weight_update(PARTIAL)  # what takes its place has none open
    base = Path(sampler.facts.directory)
    await bring(sampler, make_transport("torch_gloo", trainer, CHUNK_BYTES), base, "base")
    (sequence,) = (await sampler(BASE_MODEL, ask(PROMPT))).sequences
    np.testing.assert_allclose(sequence.logprobs, of_the_weights(base, sequence), atol=ATOL, rtol=0)


async def test_a_server_whose_sender_dies_in_the_middle_is_lost(
    sampler: Sampler, trainer: TrainerGroup, transport: WeightTransport, tmp_path: Path
) -> None:
    """It holds part of the new weights, and none of the old ones."""
    write_model(tmp_path / "new", tied=False, seed=3)
    await trainer._ranks.ping()
    dying = killing(transport, 3, trainer.pids()[0])
    with pytest.raises(WeightSyncError, match="update failed: rank 0 died") as caught:
        await bring(sampler, dying, tmp_path / "new", "v2")
    assert caught.value.lost == sampler.client.server_urls
    control = sampler.client.control
    assert await control.weight_version() == PARTIAL
    while trainer.broken is None:
        await trainer.watch(10.0)
    await trainer.restart()
    await control.finish_weight_update(PARTIAL)  # what takes its place has none open
    await bring(sampler, make_transport("torch_gloo", trainer, CHUNK_BYTES), tmp_path / "new", "v3")
    (sequence,) = (await sampler(BASE_MODEL, ask(PROMPT))).sequences
    expected = of_the_weights(tmp_path / "new", sequence)
    np.testing.assert_allclose(sequence.logprobs, expected, atol=ATOL, rtol=0)


async def test_a_server_that_dies_in_the_middle_is_named_and_lost(
    sampler: Sampler, transport: WeightTransport
) -> None:
    """The last test of this module."""
    (url,) = sampler.client.server_urls
    port = url.rpartition(":")[2]
    server = next(each for each in psutil.process_iter() if f"--port {port} " in title(each))
    pids = [server.pid, *(child.pid for child in server.children(recursive=True))]
    with pytest.raises(WeightSyncError, match=f"update failed: {url}") as caught:
        await bring(sampler, killing(transport, 3, *pids), Path(sampler.facts.directory), "base")
    assert (caught.value.failed, caught.value.lost) == ((url,), (url,))

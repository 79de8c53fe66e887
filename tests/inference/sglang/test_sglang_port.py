"""The port of a sampling engine, kept by a real SGLang; its logprobs are Hugging Face's."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from skyrl_tinker.domain.samples import TargetTokens
from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.errors import UserError
from skyrl_tinker.inference.client.remote_client import RemoteInferenceClient
from skyrl_tinker.inference.constants import BASE_MODEL
from skyrl_tinker.inference.sglang.sglang_dialect import SGLANG
from tests.inference.client.test_prompt_scores import assert_targets, dense_targets
from tests.inference.client.test_sampling_port import (  # noqa: F401 - kept here as there
    LONG,
    PROMPT,
    assert_complete,
    facts,
    start,
    test_a_pause_that_waits_interrupts_no_sample,
    test_a_sample_that_is_interrupted_is_complete_in_the_end,
    test_a_server_says_what_it_is,
    test_a_stop_token_ends_a_sequence_and_stays_in_it,
    test_an_adapter_is_served_under_its_name_from_its_load_until_it_is_unloaded,
    test_an_adapter_without_files_is_refused,
    test_each_sequence_has_the_tokens_asked_for_with_logprobs_and_a_version,
    test_samples_name_the_version_that_was_set,
)
from tests.inference.support.samplers import (
    Sampler,
    all_logprobs,
    ask,
    assert_same_logprobs,
    publish_and_load,
    random_adapter,
    reference,
    spec_of,
    target_logprobs,
    unique,
)
from tests.support.sglang_cpu.sglang_server import interpreter, serving

ARRIVED_S = 0.5
"""Enough for requests to reach a server; where it was not, a test proves less."""

pytestmark = [pytest.mark.servers, pytest.mark.long]


@pytest.fixture(scope="module")
def url(facts: BaseModelFacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:  # noqa: F811
    with serving(spec_of(facts, tmp_path_factory.mktemp("logs")), interpreter()) as url:
        yield url


@pytest.fixture
async def sampler(url: str, facts: BaseModelFacts) -> AsyncIterator[Sampler]:  # noqa: F811
    client = RemoteInferenceClient(url, (url,), dialect=SGLANG)
    yield Sampler(client, facts)
    await client.close()


@pytest.mark.parametrize("mode", ["keep", "abort"])
@pytest.mark.parametrize("clear_cache", [True, False])
async def test_a_sample_stands_still_in_a_pause(sampler: Sampler, mode: str, clear_cache: bool) -> None:
    control = sampler.client.control
    await control.pause(mode, clear_cache=clear_cache)  # type: ignore[arg-type]
    sampling = await start(sampler, "paused")
    assert await control.is_paused()
    assert not sampling.done()
    await control.resume()
    assert not await control.is_paused()
    await assert_complete(sampling)


async def test_logprobs_are_those_of_the_model_at_any_temperature(sampler: Sampler) -> None:
    model = reference(sampler.facts.directory)
    for temperature in (0.0, 0.7, 1.0):
        asked = ask(PROMPT, num_samples=2, temperature=temperature, prompt_logprobs=True)
        output = await sampler(BASE_MODEL, asked)
        assert_same_logprobs(output, model, PROMPT)
        assert output.prompt_logprobs is not None
        expected = target_logprobs(model, PROMPT)
        np.testing.assert_allclose(output.prompt_logprobs[1:], expected, atol=1e-3)


async def test_the_likeliest_tokens_are_those_of_the_model(sampler: Sampler) -> None:
    asked = ask(PROMPT, topk_prompt_logprobs=3, topk_sample_logprobs=2, prompt_logprobs_last_n=4)
    output = await sampler(BASE_MODEL, asked)
    (sequence,) = output.sequences
    best = all_logprobs(reference(sampler.facts.directory), PROMPT + sequence.tokens).topk(3)
    listed = output.topk_prompt_logprobs
    assert listed is not None
    assert [len(row) for row in listed] == [0] * (len(PROMPT) - 4) + [3] * 4
    rows = [*listed[-4:], *sequence.topk]
    for row, tokens in zip(rows, best.indices[len(PROMPT) - 5 :].tolist(), strict=True):
        assert [token for token, _ in row] == tokens[: len(row)]


@pytest.mark.parametrize("adapted", [False, True])
async def test_given_tokens_have_the_logprobs_of_the_model(
    sampler: Sampler, tmp_path: Path, adapted: bool
) -> None:
    name, adapter = BASE_MODEL, None
    if adapted:
        name, adapter = unique(tmp_path), random_adapter(sampler.facts.directory, 8, 1)
        await publish_and_load(sampler, adapter, tmp_path, name)
    rows = len(PROMPT) - 1
    sparse = TargetTokens((rows, 40), (9, 3, 9), (0, 2, *[2] * (rows - 2), 3), (1, 30, 39))
    expected = all_logprobs(reference(sampler.facts.directory, adapter), PROMPT)
    for targets in (dense_targets(rows, 3, seed=1), sparse):
        asked = ask(PROMPT, num_samples=2, prompt_logprobs=True, prompt_logprobs_last_n=2)
        output = await sampler(name, replace(asked, target_prompt_logprobs=targets))
        assert_targets(output, targets, expected)
        assert output.prompt_logprobs is not None
        own = expected.gather(1, torch.tensor(PROMPT[1:])[:, None])[-2:, 0]
        np.testing.assert_allclose(output.prompt_logprobs[-2:], own, atol=1e-3)


@pytest.mark.parametrize("unembed", [False, True])
async def test_adapters_side_by_side_have_the_logprobs_of_their_own(
    sampler: Sampler, tmp_path: Path, unembed: bool
) -> None:
    for rank in (8, 16):
        name = unique(tmp_path / str(rank))
        adapter = random_adapter(sampler.facts.directory, rank, rank, unembed=unembed)
        await publish_and_load(sampler, adapter, tmp_path, name)
        output = await sampler(name, ask(PROMPT, num_samples=2, prompt_logprobs=True))
        model = reference(sampler.facts.directory, adapter)
        assert_same_logprobs(output, model, PROMPT)
        assert output.prompt_logprobs is not None
        np.testing.assert_allclose(output.prompt_logprobs[1:], target_logprobs(model, PROMPT), atol=1e-3)


async def test_adapters_of_one_batch_have_the_logprobs_of_their_own(sampler: Sampler, tmp_path: Path) -> None:
    """Prompts that are read together, too."""
    adapters = {
        unique(tmp_path / str(seed)): random_adapter(sampler.facts.directory, 8, seed) for seed in (1, 2)
    }
    for name, adapter in adapters.items():
        await publish_and_load(sampler, adapter, tmp_path, name)
    await sampler.client.control.pause("keep")  # all wait for the same step
    asked = [asyncio.create_task(sampler(model, ask(PROMPT))) for model in (BASE_MODEL, *adapters)]
    await asyncio.sleep(ARRIVED_S)
    await sampler.client.control.resume()
    for adapter, output in zip((None, *adapters.values()), await asyncio.gather(*asked), strict=True):
        assert_same_logprobs(output, reference(sampler.facts.directory, adapter), PROMPT)


@pytest.mark.parametrize("limit", [{}, {"top_p": 0.5}, {"top_k": 5}, {"temperature": 0.0}], ids=str)
async def test_a_diverged_adapter_fails_its_own_samples_alone(
    sampler: Sampler, tmp_path: Path, limit: dict[str, float]
) -> None:
    """In one batch with another's."""
    name, adapter = unique(tmp_path), random_adapter(sampler.facts.directory, 8, 1)
    wrong = {tensor: np.full_like(value, np.nan) for tensor, value in adapter.tensors.items()}
    await publish_and_load(sampler, replace(adapter, tensors=wrong), tmp_path, name)
    long = asyncio.create_task(sampler(BASE_MODEL, ask(PROMPT, max_tokens=LONG)))
    with pytest.raises(UserError, match="diverged"):
        await sampler(name, ask(PROMPT, **limit))
    assert_same_logprobs(await long, reference(sampler.facts.directory), PROMPT)

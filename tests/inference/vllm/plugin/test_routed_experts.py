"""vLLM lists the experts that plain Hugging Face chooses for the same tokens, in whatever steps it ran."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_tinker.domain.samples import SampleOutput, SampleRequest
from skyrl_tinker.errors import SamplerError
from skyrl_tinker.inference.client.generated import GeneratedSequence
from skyrl_tinker.inference.client.sample_parts import remainder
from skyrl_tinker.inference.vllm.vllm_requests import body
from skyrl_tinker.inference.vllm.vllm_responses import parse
from skyrl_tinker.weight_sync.shared_memory import SharedMemoryTransport
from skyrl_tinker.weight_sync.sync import sync_weights
from tests.inference.support.mixtures import ATTENTION, EXPERTS, expert_adapter, write_merged
from tests.inference.support.samplers import (
    CONTEXT,
    Sampler,
    Served,
    ask,
    make_sampler,
    prompt_of,
    publish_adapter,
    reference,
)
from tests.support.sampler_clients import vllm_servers

pytestmark = pytest.mark.long

BLOCK = 128  # tokens of the KV cache that are cached together


def _experts(model: Any, tokens: tuple[int, ...]) -> np.ndarray:
    """[len(tokens) - 1, layers, k], which the plain model chooses, in rising order."""
    chosen: list[torch.Tensor] = []
    keep: Callable[..., None] = lambda module, args, output: chosen.append(output[2])  # noqa: E731
    hooks = [block.mlp.gate.register_forward_hook(keep) for block in model.model.layers]
    with torch.no_grad():
        model(torch.tensor([tokens[:-1]]))
    for hook in hooks:
        hook.remove()
    return np.sort(torch.stack(chosen, 1).numpy())


def assert_experts(output: SampleOutput, model: Any, prompt: tuple[int, ...]) -> None:
    for sequence in output.sequences:
        assert sequence.routed_experts is not None
        assert sequence.routed_experts.dtype == np.uint8
        expected = _experts(model, prompt + sequence.tokens)
        np.testing.assert_array_equal(np.sort(sequence.routed_experts), expected)


async def test_prompts_and_samples_have_the_experts_of_the_plain_model(mixture: Served) -> None:
    """In prompts of several steps, from the cache, of several samples, beside others in a batch."""
    sampler, model = make_sampler(mixture), reference(mixture.facts.directory)
    first = prompt_of(200, seed=50)
    requests = [
        ask(first, max_tokens=20, routed_experts=True),
        ask(first, max_tokens=20, num_samples=2, routed_experts=True),
        ask(first[:150] + prompt_of(60, seed=51), max_tokens=20, routed_experts=True),
        ask(first[:1], max_tokens=1, num_samples=2, temperature=0.0, routed_experts=True),
    ]
    outputs = [await sampler("base", requests[0])]
    outputs += await asyncio.gather(*(sampler("base", request) for request in requests[1:]))
    assert [output.cached_tokens for output in outputs] == [0, BLOCK, BLOCK, 0]
    for request, output in zip(requests, outputs, strict=True):
        assert_experts(output, model, request.prompt)
    await sampler.client.close()


async def test_adapters_and_new_weights_route_as_they_do_when_merged(mixture: Served, tmp_path: Path) -> None:
    """The same prompt each time: what is cached of it belongs to one adapter, and to weights before."""
    sampler, base, prompt = make_sampler(mixture), Path(mixture.facts.directory), prompt_of(140, seed=52)
    request = ask(prompt, max_tokens=8, routed_experts=True)
    adapter = expert_adapter(base, 8, 7, ATTENTION, EXPERTS)
    publish_adapter(adapter, tmp_path / "routed", str(base))
    await sampler.client.control.load_adapter("routed", str(tmp_path / "routed"))
    merged = write_merged(base, tmp_path / "merged", adapter)
    plain, adapted = reference(base), reference(merged)
    assert not np.array_equal(_experts(plain, prompt), _experts(adapted, prompt))
    for name, model in (("base", plain), ("routed", adapted), ("base", plain)):
        assert_experts(await sampler(name, request), model, prompt)
    for directory, model in ((merged, adapted), (base, plain)):
        await sync_weights(sampler.client.control, SharedMemoryTransport(100_000), directory, directory.name)
        assert_experts(await sampler("base", request), model, prompt)
    await sampler.client.close()


async def test_a_resumed_sequence_has_the_experts_of_all_its_tokens(mixture: Served) -> None:
    sampler, model, prompt = make_sampler(mixture), reference(mixture.facts.directory), prompt_of(20, seed=53)
    request = ask(prompt, max_tokens=220, routed_experts=True)
    aborted = await _aborted(sampler, request)
    for kept in (aborted, aborted.first(len(aborted.tokens) - 1), aborted.first(0)):
        rest = remainder(request, 0, kept.tokens, context=CONTEXT)
        assert rest is not None
        response = await sampler.client.data.sample("base", rest, "test", (), CONTEXT, None)
        whole = kept.then(response.sequences[0])
        assert len(whole.tokens) == 220
        assert whole.experts is not None
        np.testing.assert_array_equal(np.sort(whole.experts), _experts(model, prompt + whole.tokens))
    await sampler.client.close()


async def _aborted(sampler: Sampler, request: SampleRequest) -> GeneratedSequence:
    """Abort the request while its tokens are generated."""
    for delay_s in (0.1, 0.2, 0.4, 0.8):
        sampling = asyncio.create_task(sampler.client.data.sample("base", request, "test", (), CONTEXT, None))
        await asyncio.sleep(delay_s)
        await sampler.client.control.pause("abort")
        await sampler.client.control.resume()
        (sequence,) = (await sampling).sequences
        if sequence.finish == "abort" and len(sequence.tokens) > 1:
            return sequence
    pytest.fail("never aborted between its tokens")


async def test_an_external_server_that_lists_experts_is_taken(mixture: Served) -> None:
    await vllm_servers(mixture.group.urls, 5.0, 2.0, CONTEXT + 1, router_replay=True).ready()


async def test_who_does_not_ask_gets_no_experts_of_the_prompt(mixture: Served) -> None:
    sampler, request = make_sampler(mixture), ask(prompt_of(50, seed=54), max_tokens=5)
    payload = await sampler.client.data.generate(body("base", request, eos=(), context=CONTEXT))
    assert parse(payload, request).sequences[0].experts is None
    with pytest.raises(
        SamplerError, match=r"the experts of 4 tokens, expected 54: .* --enable-return-routed"
    ):
        parse(payload, replace(request, routed_experts=True))
    await sampler.client.close()

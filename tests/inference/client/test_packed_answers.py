"""Packed answers of a real server: the same as those of vLLM's own route, in all but their form."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from skyrl_tinker.domain.samples import SampleRequest, TargetTokens, TopkRow, VersionSpan
from skyrl_tinker.inference.client import http_connection
from skyrl_tinker.inference.client.generated import SamplerResponse
from skyrl_tinker.inference.client.http_connection import HttpStatusError
from skyrl_tinker.inference.packed import PROTOCOL
from skyrl_tinker.inference.vllm import vllm_requests, vllm_responses
from tests.inference.support.samplers import (
    CONTEXT,
    Sampler,
    ask,
    prompt_of,
    publish_and_load,
    random_adapter,
    unique,
)

PATH = "/inference/v1/generate"
PROMPT = prompt_of(9)


async def answers(sampler: Sampler, body: Mapping[str, Any]) -> list[Any]:
    """Ask for a packed answer and for vLLM's own, without cached prompts; an error is its status and text."""
    found: list[Any] = []
    for channel in ("over the channel", ""):
        http = sampler.client.data.http
        await sampler.client.control.reset_prefix_cache()
        try:
            answer = await http.request(
                "POST", sampler.client.server_urls[0] + PATH, json=body, channel=channel
            )
        except HttpStatusError as error:
            found.append((error.status, error.message))
        else:
            listed = answer.content["choices"][0]["logprobs"]
            assert isinstance(listed.get("logprobs"), np.ndarray) == bool(channel)
            found.append(answer.content)
    return found


def assert_alike(packed: SamplerResponse, plain: SamplerResponse) -> None:
    """All the same, but for rounding: what shares a step with others is computed otherwise."""
    for found, expected in zip(packed.sequences, plain.sequences, strict=True):
        np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4)
        assert_same_rows(found.topk, expected.topk)
        assert replace(found, logprobs=(), topk=()) == replace(expected, logprobs=(), topk=())
    assert_same_rows(packed.topk_prompt_logprobs or (), plain.topk_prompt_logprobs or ())
    np.testing.assert_allclose(packed.prompt_logprobs or (), plain.prompt_logprobs or (), atol=1e-4)
    if packed.scores and plain.scores:
        np.testing.assert_allclose(packed.scores.targets, plain.scores.targets, atol=1e-4)
    drawn = [each.scores and each.scores.draws and each.scores.draws.tokens for each in (packed, plain)]
    assert drawn[0] == drawn[1]
    compared = {"sequences": (), "scores": None, "prompt_logprobs": None, "topk_prompt_logprobs": None}
    assert replace(packed, **compared) == replace(plain, **compared)  # type: ignore[arg-type]
    assert (packed.scores is None) == (plain.scores is None)


def assert_same_rows(found: Sequence[TopkRow], expected: Sequence[TopkRow]) -> None:
    for row, other in zip(found, expected, strict=True):
        values = dict(other)  # two that differ in rounding alone may have changed places
        assert {token for token, _ in row} == values.keys()
        np.testing.assert_allclose(
            [value for _, value in row], [values[token] for token, _ in row], atol=1e-4
        )


@pytest.mark.parametrize(
    "request_",
    [
        ask(PROMPT, max_tokens=20, seed=3),
        ask(PROMPT, num_samples=5, max_tokens=7, seed=3),
        ask(PROMPT, num_samples=3, max_tokens=40, seed=3, stop=("e", "t")),
        ask(PROMPT, max_tokens=30, seed=3, temperature=0.7, top_k=5, top_p=0.9),
        ask(PROMPT, max_tokens=2, seed=3, target_prompt_logprobs=TargetTokens((8, 2), tuple(range(16)))),
        ask(PROMPT, max_tokens=2, seed=3, prompt_alt_tokens_k=2),
        ask(PROMPT, num_samples=3, max_tokens=9, seed=3, topk_sample_logprobs=20),
        ask(PROMPT, max_tokens=9, seed=3, temperature=0.7, topk_sample_logprobs=511, stop=("e",)),
        ask(PROMPT, max_tokens=1, seed=3, prompt_logprobs=True, topk_prompt_logprobs=3),
        ask(PROMPT, max_tokens=2, seed=3, topk_prompt_logprobs=511, topk_sample_logprobs=1),
        ask(PROMPT, max_tokens=1, seed=3, prompt_logprobs=True, prompt_logprobs_last_n=4),
        ask(PROMPT[:1], max_tokens=1, seed=3, prompt_logprobs=True, topk_prompt_logprobs=3),
    ],
    ids=[
        *("one", "several", "stop texts", "top k and p", "targets", "draws", "listed", "all listed"),
        *("prompt", "all of the prompt", "end of the prompt", "one token of a prompt"),
    ],
)
async def test_a_packed_answer_says_the_same(sampler: Sampler, request_: SampleRequest) -> None:
    body = vllm_requests.body("base", request_, eos=sampler.facts.eos_token_ids, context=CONTEXT)
    packed, plain = [vllm_responses.parse(each, request_) for each in await answers(sampler, body)]
    assert_alike(packed, plain)
    assert len(packed.sequences) == request_.num_samples
    assert all(sequence.logprobs and sequence.versions for sequence in packed.sequences)


async def test_a_packed_answer_of_an_adapter_names_it(sampler: Sampler, tmp_path: Path) -> None:
    name, adapter = unique(tmp_path), random_adapter(sampler.facts.directory, 8, seed=1)
    await publish_and_load(sampler, adapter, tmp_path, name)
    request = ask(PROMPT, num_samples=2, max_tokens=5, seed=3)
    body = vllm_requests.body(name, request, eos=(), context=CONTEXT)
    packed, plain = [vllm_responses.parse(each, request) for each in await answers(sampler, body)]
    await sampler.client.control.unload_adapter(name)
    assert_alike(packed, plain)
    assert [sequence.versions for sequence in packed.sequences] == [(VersionSpan(name, 0, 5),)] * 2


@pytest.mark.parametrize(
    "params",
    [{"prompt_logprobs": -1, "logprobs": 0}, {"logprobs": -1}, {}],
    ids=["all of the prompt", "all", "none"],
)
async def test_what_arrays_cannot_say_is_said_in_json(sampler: Sampler, params: dict[str, Any]) -> None:
    body = {"model": "base", "token_ids": PROMPT, "sampling_params": {"max_tokens": 3, "seed": 1, **params}}
    url = sampler.client.server_urls[0] + PATH
    answer = await sampler.client.data.http.request("POST", url, json=body, channel="sample")
    assert answer.headers["Content-Type"] == "application/json"
    assert len(answer.content["choices"][0]["token_ids"]) == 3


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"model": "nobody"}, 404, "nobody"),
        ({"token_ids": [512]}, 400, "512"),
        ({"token_ids": []}, 400, "token_ids"),
        ({"token_ids": [1] * (CONTEXT + 2)}, 400, "maximum context length"),
        (
            {"token_ids": [1] * (CONTEXT + 2), "sampling_params": {"max_tokens": 1, "logprobs": 0}},
            400,
            "maximum",
        ),
        ({"sampling_params": {"max_tokens": "many"}}, 400, "max_tokens"),
        ({"sampling_params": {"n": 100_000}}, 400, "n must be at most"),
        ({"sampling_params": {"n": 4000, "logprobs": 0}}, 400, "max_num_seqs"),
    ],
)
async def test_what_is_refused_is_refused_with_the_same_words(
    sampler: Sampler, change: dict[str, Any], status: int, message: str
) -> None:
    packed, plain = await answers(
        sampler, {"model": "base", "token_ids": [1], "sampling_params": {"logprobs": 0}} | change
    )
    assert packed == plain
    assert packed[0] == status
    assert message in packed[1]


@pytest.mark.parametrize("protocols", [(), ("skyrl-tinker.samples.0",)], ids=["none", "another"])
async def test_a_client_of_another_version_gets_no_channel(
    sampler: Sampler, protocols: tuple[str, ...]
) -> None:
    url = sampler.client.server_urls[0] + PATH
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect(url, protocols=protocols)
        assert refused.value.status == 403
        async with session.ws_connect(url, protocols=(*protocols, PROTOCOL)) as socket:
            assert socket.protocol == PROTOCOL


@pytest.mark.parametrize(
    "listed", [{}, {"topk_sample_logprobs": 3}, {"prompt_logprobs": True}, {"topk_prompt_logprobs": 3}]
)
async def test_samples_come_packed_with_the_logprobs_that_they_list(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch, listed: dict[str, Any]
) -> None:
    unpacked: list[bytes] = []
    unpack = http_connection.unpack
    monkeypatch.setattr(
        http_connection, "unpack", lambda content: unpacked.append(content) or unpack(content)
    )
    await sampler("base", ask(PROMPT, max_tokens=2, **listed))
    assert len(unpacked) == 1

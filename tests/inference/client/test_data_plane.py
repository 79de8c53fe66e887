"""The routed calls that speak vLLM's own JSON, against a real server."""

import json
import pickle
import threading
from typing import Any

import pytest

from skyrl_tinker.errors import NotFoundError, SamplerError, UserError
from skyrl_tinker.inference.client.data_plane import StreamPath
from skyrl_tinker.inference.client.generated import SamplerResponse
from skyrl_tinker.inference.client.in_flight import InFlight
from skyrl_tinker.inference.vllm.vllm_dialect import VLLM
from tests.inference.support.samplers import Sampler, ask, prompt_of
from tests.support.sampler_clients import vllm_client

CHAT = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
COMPLETION = {"model": "base", "prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0}
GENERATE = {"model": "base", "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 3, "temperature": 0}}


async def test_text_and_tokens_turn_into_each_other(sampler: Sampler) -> None:
    tokens = await sampler.client.data.tokenize({"prompt": "hello é"})
    assert await sampler.client.data.detokenize(tokens) == "hello é"


async def test_tokens_completions_and_chats_are_generated(sampler: Sampler) -> None:
    generated = await sampler.client.data.generate(GENERATE)
    assert len(generated["choices"][0]["token_ids"]) == 3
    completed = await sampler.client.data.openai("/v1/completions", {**COMPLETION, "return_token_ids": True})
    assert completed["choices"][0]["token_ids"] == generated["choices"][0]["token_ids"]
    chat = await sampler.client.data.openai("/v1/chat/completions", CHAT)
    assert chat["choices"][0]["message"]["role"] == "assistant"


async def test_an_openai_request_may_go_to_a_server_past_the_router(sampler: Sampler) -> None:
    (url,) = sampler.client.server_urls
    client = vllm_client("http://127.0.0.1:9", (url,), sampler.client.token)
    chat = await client.data.openai("/v1/chat/completions", CHAT, server=url)
    assert chat["choices"][0]["message"]["role"] == "assistant"
    await client.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT), ("/inference/v1/generate", GENERATE)],
)
async def test_answers_stream_as_server_sent_events(sampler: Sampler, path: StreamPath, body: object) -> None:
    call = {**body, "stream": True}  # type: ignore[dict-item]
    async with sampler.client.data.stream(path, call, headers={"X-Session-ID": "s"}) as chunks:
        events = b"".join([chunk async for chunk in chunks]).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: "))["choices"] for event in events[:-2])


async def test_what_vllm_refuses_raises_before_anything_streams(sampler: Sampler) -> None:
    with pytest.raises(NotFoundError, match="nobody"):
        async with sampler.client.data.stream("/v1/completions", {**COMPLETION, "model": "nobody"}):
            raise AssertionError("it must not be entered")
    with pytest.raises(UserError, match="512"):
        await sampler.client.data.openai("/v1/completions", {**COMPLETION, "prompt": [512]})
    client = vllm_client("http://127.0.0.1:9", ("http://127.0.0.1:9",))
    with pytest.raises(SamplerError, match=r"127\.0\.0\.1:9"):
        async with client.data.stream("/v1/completions", COMPLETION):
            raise AssertionError("it must not be entered")
    await client.close()


def test_running_requests_are_known_by_their_tag_until_they_end() -> None:
    running = InFlight()
    with running.attempt("a") as first, running.attempt("a") as second, running.attempt(None):
        switched = running.switch("a")
        assert switched == [first, second]
        with running.attempt("a") as third:
            assert not third.switched
            assert running.still(switched) == switched
            assert pickle.loads(pickle.dumps(running)).switch("a") == []
    assert first.switched
    assert second.switched
    assert running.still(switched) == []
    assert running.switch("a") == []


def test_a_key_keeps_its_server_while_others_come_and_go() -> None:
    urls, keys = tuple(f"http://127.0.0.1:{port}" for port in range(4)), [str(key) for key in range(4000)]
    client = vllm_client("http://router", urls, past_proxy=True)

    def servers() -> list[str]:
        return list(map(client.data._server_of, keys))

    before = servers()
    assert all(800 < before.count(url) < 1200 for url in urls)
    client.retarget("http://router", urls[1:])
    assert all(now == then for then, now in zip(before, servers(), strict=True) if then != urls[0])
    client.retarget("http://router", urls)
    assert servers() == before
    client.retarget("http://router", ())
    assert set(servers()) == {"http://router"}
    assert vllm_client("http://router", urls).data._server_of("a") == "http://router"


async def test_long_lists_of_logprobs_are_not_parsed_on_the_event_loop(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    parse = VLLM.parse

    def noted(*args: Any, **kwargs: Any) -> SamplerResponse:
        threads.append(threading.current_thread())
        return parse(*args, **kwargs)

    monkeypatch.setattr(type(VLLM), "parse", staticmethod(noted))
    for length in (20, 200):
        output = await sampler("base", ask(prompt_of(length), max_tokens=1, topk_prompt_logprobs=64))
        assert output.topk_prompt_logprobs is not None
        assert [len(row) for row in output.topk_prompt_logprobs] == [0, *[64] * (length - 1)]
    await sampler("base", ask(prompt_of(5), num_samples=3, max_tokens=50, topk_sample_logprobs=100))
    assert [thread is threading.current_thread() for thread in threads] == [True, False, False]

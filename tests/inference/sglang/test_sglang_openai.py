"""OpenAI's requests as SGLang takes them, and answers of a real server, kept in recorded.json, as of vLLM."""

import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from skyrl_tinker import config
from skyrl_tinker.engine.sampler.launch import launch_servers
from skyrl_tinker.errors import SamplerError, UserError
from skyrl_tinker.inference.client.remote_client import RemoteInferenceClient
from skyrl_tinker.inference.constants import BASE_MODEL
from skyrl_tinker.inference.sglang.sglang_dialect import SGLANG
from skyrl_tinker.inference.sglang.sglang_process import SglangProcess
from tests.inference.sglang.recording import FILE, OPENAI
from tests.inference.support.samplers import spec_of, write_model

RECORDED: dict[str, Any] = json.loads(FILE.read_text())


def given(name: str) -> Any:
    return json.loads(json.dumps(RECORDED[name]))  # its own copy


def read(name: str) -> dict[str, Any]:
    return SGLANG.openai_reader(OPENAI[name][1])(given(name))


def assert_complete(logprobs: dict[str, Any], listed: int, start: int = 0) -> None:
    tokens, values = logprobs["tokens"], logprobs["token_logprobs"]
    ends = accumulate(map(len, tokens), initial=start)
    assert logprobs["text_offset"] == [*ends][:-1]
    for token, value, row in zip(tokens, values, logprobs["top_logprobs"], strict=True):
        assert (row is None) == (value is None)
        assert row is None or row[token] == value
        assert row is None or len(row) in (listed, listed + 1)


def test_only_its_stops_end_a_request_and_it_has_its_own_values() -> None:
    body = SGLANG.openai_body({"stop_token_ids": [2], "temperature": 0.5}, BASE_MODEL, 3)
    assert "ignore_eos" not in body, "it would switch listed tokens off as well"
    assert (body["model"], body["priority"], body["stop_token_ids"]) == (BASE_MODEL, 3, [2])
    assert (body["min_p"], body["repetition_penalty"]) == (0, 1), "else those of generation_config.json"


def test_an_adapter_is_part_of_the_models_name() -> None:
    assert SGLANG.openai_body({}, "v1", 0)["model"] == f"{BASE_MODEL}:v1"


def test_logprobs_of_a_completion_have_places_and_the_sampled_tokens() -> None:
    (choice,) = read("completion")["choices"]
    assert len(choice["logprobs"]["tokens"]) == OPENAI["completion"][1]["max_tokens"]
    assert_complete(choice["logprobs"], 0)


def test_an_echoed_prompt_is_scored_also_where_only_sampled_tokens_are_listed() -> None:
    (choice,) = read("echo")["choices"]
    assert choice["text"].startswith("What is")
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert len(choice["logprobs"]["tokens"]) > OPENAI["echo"][1]["max_tokens"]
    assert_complete(choice["logprobs"], 0)


def test_the_likeliest_tokens_are_listed_and_the_sampled_one() -> None:
    answer = read("likeliest")
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice in answer["choices"]:
        assert_complete(choice["logprobs"], 2)


def test_an_answer_is_whole_by_the_names_of_vllm() -> None:
    answer = read("a stop token")
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] in OPENAI["a stop token"][1]["stop_token_ids"]
    assert "matched_stop" not in choice
    assert "metadata" not in answer
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0


def test_of_several_choices_nobody_knows_what_was_cached() -> None:
    last = given("stream")[-1]
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "by a first pass of its own"
    assert SGLANG.openai_reader(OPENAI["stream"][1])(last)["usage"]["prompt_tokens_details"] is None


def test_a_stream_has_one_name_and_goes_on_in_the_text_of_each_choice() -> None:
    reader = SGLANG.openai_reader(OPENAI["stream"][1])
    chunks = [reader(chunk) for chunk in given("stream")]
    assert len({chunk["id"] for chunk in given("stream")}) > 1
    assert len({chunk["id"] for chunk in chunks}) == 1
    ends = [0, 0]
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        assert_complete(choice["logprobs"], 1, ends[choice["index"]])
        ends[choice["index"]] += sum(map(len, choice["logprobs"]["tokens"]))
        assert chunk["usage"]["completion_tokens"] > 0
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 2 * OPENAI["stream"][1]["max_tokens"]


def test_a_chat_has_logprobs_of_its_own_form() -> None:
    (choice,) = read("chat")["choices"]
    assert choice["message"]["role"] == "assistant"
    assert all(math.isfinite(each["logprob"]) for each in choice["logprobs"]["content"])
    assert "stop_reason" in choice


def test_numbers_that_are_none_say_that_training_has_diverged() -> None:
    answer = given("completion")
    answer["choices"][0]["matched_stop"] = "NaN happened"
    with pytest.raises(UserError, match="not finite"):
        SGLANG.openai_reader(OPENAI["completion"][1])(answer)


@pytest.mark.parametrize(
    ("changed", "keeps_cache", "message"),
    [
        ({}, False, None),
        ({}, True, None),
        ({"version": "0.5.24"}, False, r"version: found 0\.5\.24, expected 0\.5\.23"),
        ({"enable_cache_report": False}, False, "enable_cache_report: found False, expected True"),
        ({"prefill_max_requests": None}, False, "prefill_max_requests: found None, expected 1"),
        ({"prefill_max_requests": None, "lora_backend": "csgmv"}, False, None),
        ({"disable_priority_preemption": False}, False, "disable_priority_preemption: found False"),
        ({"disable_overlap_schedule": False}, False, None),
        ({"disable_overlap_schedule": False}, True, "disable_overlap_schedule: found False, expected True"),
    ],
)
async def test_a_server_of_others_without_an_argument_that_counts_is_refused(
    changed: dict[str, Any], keeps_cache: bool, message: str | None
) -> None:
    async with _told(RECORDED["server"] | changed) as url:
        await _require(url, message, keeps_cache=keeps_cache)


async def test_a_server_of_vllm_is_refused_by_name() -> None:
    async with _told({"vllm_config": "", "vllm_env": {}}) as url:
        await _require(url, r"version: found None, expected 0\.5\.23")


async def test_a_server_of_others_is_asked_for_an_argument_that_a_setting_needs(tmp_path: Path) -> None:
    facts = write_model(tmp_path / "model", tied=False)
    spec = replace(spec_of(facts, tmp_path), engine=SglangProcess(), keeps_cache=True)
    async with _told(RECORDED["server"] | {"disable_overlap_schedule": False}) as url:
        servers = launch_servers(config.load(sampler_engine="sglang", sampler_urls=(url,)), spec, [])
        with pytest.raises(SamplerError, match=r"\(sampler_urls\) .*disable_overlap_schedule: found False"):
            await servers.ready()


@asynccontextmanager
async def _told(info: dict[str, Any]) -> AsyncIterator[str]:
    """Yield the URL of a server that lives, and tells this of itself."""

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def server_info(_: web.Request) -> web.Response:
        return web.json_response(info)

    app = web.Application()
    app.add_routes([web.get("/health", health), web.get("/server_info", server_info)])
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


async def _require(url: str, message: str | None, *, keeps_cache: bool = False) -> None:
    """Check this server; `message`: of its refusal."""
    client = RemoteInferenceClient(url, (url,), dialect=SGLANG)
    try:
        if message is None:
            await client.control.require_arguments(keeps_cache=keeps_cache)
        else:
            with pytest.raises(SamplerError, match=message):
                await client.control.require_arguments(keeps_cache=keeps_cache)
    finally:
        await client.close()

"""Answers of a real SGLang, kept in recorded.json: python -m tests.inference.sglang.recording URL MODEL."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from skyrl_tinker.domain.samples import SampleRequest, TargetTokens
from skyrl_tinker.inference.client.http_connection import HttpStatusError, JsonHttp
from skyrl_tinker.inference.constants import BASE_MODEL
from skyrl_tinker.inference.sglang.sglang_control import ARGUMENTS
from skyrl_tinker.inference.sglang.sglang_dialect import SGLANG
from tests.inference.support.samplers import CONTEXT, ask, prompt_of

FILE = Path(__file__).with_name("recorded.json")
EOS = (2, 0)
PROMPT = prompt_of(9)
TARGETS = TargetTokens((8, 2), (7, 3, -1, 7, *[-1] * 11, 3))
REQUESTS: dict[str, tuple[str, SampleRequest]] = {
    "scores": (
        BASE_MODEL,
        ask(PROMPT, max_tokens=3, prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=1),
    ),
    "the last scores": (
        BASE_MODEL,
        ask(PROMPT, max_tokens=1, prompt_logprobs=True, prompt_logprobs_last_n=2),
    ),
    "targets": (
        BASE_MODEL,
        ask(
            PROMPT,
            max_tokens=2,
            prompt_logprobs=True,
            prompt_logprobs_last_n=2,
            target_prompt_logprobs=TARGETS,
        ),
    ),
    "a stop": (BASE_MODEL, ask(PROMPT, max_tokens=60, stop=tuple(range(3, 400)))),
    "texts": (BASE_MODEL, ask(PROMPT, max_tokens=2, stop=("qq", "zz"))),
    "no adapter": ("nobody", ask(PROMPT)),
    "aborted": (BASE_MODEL, ask(PROMPT, max_tokens=200)),
}
COMPLETION = {"prompt": "What is", "n": 1, "max_tokens": 8, "stop": [], "stop_token_ids": [0]}
STREAMED = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
OPENAI: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", COMPLETION | {"logprobs": 0}),
    "echo": ("/v1/completions", COMPLETION | {"logprobs": 0, "echo": True}),
    "likeliest": ("/v1/completions", COMPLETION | {"logprobs": 2, "echo": True, "n": 2}),
    "a stop token": ("/v1/completions", COMPLETION | {"max_tokens": 200, "stop_token_ids": [*range(3, 300)]}),
    "stream": ("/v1/completions", COMPLETION | STREAMED | {"logprobs": 1, "n": 2}),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "n": 1, "max_tokens": 4, "logprobs": True},
    ),
}
"""Bodies of OpenAI's routes as the engine makes them, with those that its clients may leave out."""
TOLD = ("version", "lora_backend", "prefill_max_requests", "disable_overlap_schedule", *ARGUMENTS)
"""Of what the server tells of itself."""


def body_of(name: str) -> dict[str, Any]:
    model, request = REQUESTS[name]
    named, _ = SGLANG.call(request, f"{len(name):032}", 0)
    return SGLANG.body(model, request, eos=EOS, context=CONTEXT) | named


async def _record(url: str) -> dict[str, Any]:
    http, recorded = JsonHttp(), {}
    for name in REQUESTS:
        body = body_of(name)
        sent = asyncio.create_task(http.request("POST", url + SGLANG.path, json=body))
        if name == "aborted":
            await asyncio.sleep(0.3)
            await http.request("POST", f"{url}/abort_request", json={"rid": body["rid"]})
        try:
            recorded[name] = {"status": 200, "answer": (await sent).content}
        except HttpStatusError as error:
            recorded[name] = {"status": error.status, "answer": error.message}
    for name, (path, given) in OPENAI.items():
        body = SGLANG.openai_body(given, BASE_MODEL, 0)
        if given.get("stream"):
            async with http.stream(url + path, json=body) as pieces:
                events = b"".join([piece async for piece in pieces]).decode().split("\n\n")
            recorded[name] = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        else:
            recorded[name] = (await http.request("POST", url + path, json=body)).content
    info = (await http.request("GET", f"{url}/server_info")).content
    recorded["server"] = {name: info[name] for name in TOLD}
    answer = await http.request("POST", url + SGLANG.path, json=SGLANG.trial)
    recorded["trial"] = {"status": 200, "answer": answer.content}
    await http.close()
    return recorded


if __name__ == "__main__":
    FILE.write_text(json.dumps(asyncio.run(_record(sys.argv[1])), separators=(",", ":")) + "\n")

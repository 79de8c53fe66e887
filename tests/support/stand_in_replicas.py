"""Stand-ins for vLLM servers, which compute nothing and answer after a given time: to measure who asks.

usage: python -m tests.support.stand_in_replicas COUNT ANSWER_S LOAD_S TOKENS

One process listens on COUNT ports of loopback and prints their URLs as JSON. A request is answered after
ANSWER_S with sequences of TOKENS tokens, an adapter is loaded after LOAD_S. Ends with its parent.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from subprocess import PIPE, Popen

from aiohttp import web

from skyrl_tinker.inference.constants import BASE_MODEL, VLLM_START_VERSION
from skyrl_tinker.processes import die_with_parent, raise_open_files_limit

CONTEXT = 4096
ROOT = Path(__file__).parents[2]
Handler = Callable[[web.Request], Awaitable[web.Response]]


@contextmanager
def stand_ins(
    count: int, *, answer_s: float = 0.0, load_s: float = 0.0, tokens: int = 1
) -> Iterator[list[str]]:
    """Start them; yields their URLs."""
    arguments = map(str, (count, answer_s, load_s, tokens))
    command = [sys.executable, "-m", "tests.support.stand_in_replicas", *arguments]
    with Popen(command, cwd=ROOT, stdout=PIPE, text=True, preexec_fn=die_with_parent) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.terminate()


@cache
def answer(sequences: int, tokens: int) -> bytes:
    """Return vLLM's answer with so many sequences."""
    positions = [{"logprob": -0.5, "top_logprobs": [{"token_id": 1, "logprob": -0.5}]}] * tokens
    choices = [
        {
            "index": index,
            "token_ids": [1] * tokens,
            "logprobs": {"content": positions},
            "finish_reason": "length",
            "weight_versions": [{"version": VLLM_START_VERSION, "start": 0, "end": tokens}],
        }
        for index in range(sequences)
    ]
    return json.dumps({"choices": choices, "usage": {}}).encode()


class StandIn:
    """One of them."""

    def __init__(self, answer_s: float, load_s: float, tokens: int) -> None:
        self._answer_s = answer_s
        self._load_s = load_s
        self._tokens = tokens
        self._adapters: set[str] = set()

    def app(self) -> web.Application:
        app = web.Application()
        nothing = self._fixed({})
        app.add_routes(
            [
                web.get("/health", nothing),
                web.get("/is_sleeping", self._fixed({"is_sleeping": False})),
                web.get("/weight_info", self._fixed({"weight_version": VLLM_START_VERSION})),
                web.get("/get_world_size", self._fixed({"world_size": 1})),
                web.get("/v1/models", self._models),
                web.post("/pause", nothing),
                web.post("/resume", nothing),
                web.post("/reset_prefix_cache", self._fixed({"success": True})),
                web.post("/v1/load_lora_adapter", self._load),
                web.post("/v1/unload_lora_adapter", self._unload),
                web.post("/inference/v1/generate", self._generate),
            ]
        )
        return app

    @staticmethod
    def _fixed(content: object) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            return web.json_response(content)

        return handle

    async def _models(self, request: web.Request) -> web.Response:
        base = {"id": BASE_MODEL, "max_model_len": CONTEXT + 1, "parent": None}
        adapters = [{"id": name, "parent": BASE_MODEL} for name in sorted(self._adapters)]
        return web.json_response({"data": [base, *adapters]})

    async def _load(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self._load_s)
        self._adapters.add((await request.json())["lora_name"])
        return web.json_response({})

    async def _unload(self, request: web.Request) -> web.Response:
        self._adapters.discard((await request.json())["lora_name"])
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.Response:
        params = (await request.json())["sampling_params"]
        await asyncio.sleep(self._answer_s)
        tokens = min(self._tokens, params["max_tokens"])
        return web.Response(body=answer(params.get("n", 1), tokens), content_type="application/json")


async def _serve(count: int, answer_s: float, load_s: float, tokens: int) -> None:
    urls = []
    for _ in range(count):
        runner = web.AppRunner(StandIn(answer_s, load_s, tokens).app(), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
    print(json.dumps(urls), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    raise_open_files_limit()
    replicas, answer_seconds, load_seconds, length = sys.argv[1:]
    asyncio.run(_serve(int(replicas), float(answer_seconds), float(load_seconds), int(length)))

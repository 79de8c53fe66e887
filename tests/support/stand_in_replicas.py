"""Stand-ins for vLLM servers, which compute nothing and answer after a given time: to measure who asks.

usage: python -m tests.support.stand_in_replicas COUNT ANSWER_S LOAD_S TOKENS

One process listens on COUNT ports of loopback and prints their URLs as JSON. A request is answered after
ANSWER_S with sequences of TOKENS tokens, an adapter is loaded after LOAD_S. Ends with its parent.
"""

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import orjson
from aiohttp import web

from skyrl_tinker.inference.client.http_connection import HttpStatusError
from skyrl_tinker.inference.packed import PROTOCOL, Outgoing, asked, pack, parts_of, tell
from skyrl_tinker.system.processes import die_with_parent, raise_open_files_limit
from tests.support.scripted_replica import ScriptedReplica, ones

ROOT = Path(__file__).parents[2]


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


class StandIn:
    """HTTP server of one of them."""

    def __init__(self, replica: ScriptedReplica) -> None:
        self._replica = replica

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        return app

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if "Upgrade" in request.headers:
            return await self._channel(request)
        status, content = await self._answer(request.path, await request.read(), request.query)
        return web.Response(body=orjson.dumps(content), status=status, content_type="application/json")

    async def _channel(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(protocols=(PROTOCOL,), max_msg_size=0)
        await socket.prepare(request)
        running: dict[str, asyncio.Task[None]] = {}
        outgoing = Outgoing()

        async def reply(request_id: str, body: bytes) -> None:
            status, content = await self._answer(request.path, body, {})
            outgoing.put(tell(request_id, status, pack(content) if status < 400 else orjson.dumps(content)))

        async def write() -> None:
            while True:
                await socket.send_bytes(await outgoing.message())

        running[""] = asyncio.create_task(write())
        async for message in socket:
            for request_id, _, body in map(asked, parts_of(message.data)):
                if body:
                    running[request_id] = asyncio.create_task(reply(request_id, body))
                    running[request_id].add_done_callback(
                        lambda _, ended=request_id: running.pop(ended, None)
                    )
                elif request_id in running:
                    running[request_id].cancel()
        for task in running.values():
            task.cancel()
        return socket

    async def _answer(self, path: str, body: bytes, params: Mapping[str, str]) -> tuple[int, Any]:
        try:
            return 200, await self._replica.answer(path, orjson.loads(body or b"{}"), params)
        except HttpStatusError as error:
            return error.status, {"error": {"message": error.message}}


async def _serve(count: int, answer_s: float, load_s: float, tokens: int) -> None:
    urls = []
    for _ in range(count):
        replica = ScriptedReplica(answer_s, load_s, lambda *given: ones(*given)[:tokens])
        runner = web.AppRunner(StandIn(replica).app(), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
    print(json.dumps(urls), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    raise_open_files_limit()
    replicas, answer_seconds, load_seconds, length = sys.argv[1:]
    asyncio.run(_serve(int(replicas), float(answer_seconds), float(load_seconds), int(length)))

"""Stand-ins for vLLM servers, which compute nothing and answer after a given time: to measure who asks.

usage: python -m tests.support.stand_in_replicas COUNT ANSWER_S LOAD_S TOKENS

One process listens on COUNT ports of loopback and prints their URLs as JSON. A request is answered after
ANSWER_S with sequences of TOKENS tokens, an adapter is loaded after LOAD_S. Ends with its parent.
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen

import orjson
from aiohttp import web

from skyrl_tinker.inference.client.http_connection import HttpStatusError
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

    async def _handle(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read() or b"{}")
        try:
            content = await self._replica.answer(request.path, body, request.query)
        except HttpStatusError as error:
            return web.json_response({"error": {"message": error.message}}, status=error.status)
        return web.Response(body=orjson.dumps(content), content_type="application/json")


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

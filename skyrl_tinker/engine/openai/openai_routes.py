"""OpenAI-compatible routes: a request goes to the server of its base model, by name or tinker:// path."""

import asyncio
from collections.abc import Mapping, Sequence

import orjson
from aiohttp import web

from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.ids import OwnerId
from skyrl_tinker.domain.values import WeightVersion
from skyrl_tinker.engine.openai.openai_requests import OpenAIRequest
from skyrl_tinker.engine.openai.openai_server import OpenAIServer
from skyrl_tinker.engine.outbox import failure_of
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.errors import SkyrlTinkerError
from skyrl_tinker.protocol.schemas.chats import ChatCompletionRequest
from skyrl_tinker.protocol.schemas.openai import OWNER_HEADER, CompletionRequest, error_body, parse_openai
from skyrl_tinker.store.reports import openai_models
from skyrl_tinker.store.store import Store
from skyrl_tinker.system.off_loop import off_loop

PREFIX = "/oai/api/v1"


class OpenAIRoutes:
    def __init__(self, store: Store, servers: Sequence[OpenAIServer], metrics: Metrics) -> None:
        """`servers`: one for each base model."""
        self._store = store
        self._metrics = metrics
        self._bases = Bases(tuple(server.facts for server in servers))
        self._of: Mapping[str, OpenAIServer] = {
            name: server for server in servers for name in server.facts.names
        }

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post(f"{PREFIX}/completions", self._completions),
            web.post(f"{PREFIX}/chat/completions", self._chat),
        ]

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        return await self._respond(http, CompletionRequest, "completion")

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        return await self._respond(http, ChatCompletionRequest, "chat_completion")

    async def _respond(self, http: web.Request, model: type[OpenAIRequest], kind: str) -> web.StreamResponse:
        owner = _owner(http)
        await self._metrics.owners.know([owner])
        try:
            data = await http.read()
            request = await off_loop(len(data), lambda: parse_openai(model, orjson.loads(data)))
            server, version = await self.find(request.model, owner)
            response, outcome = await server.answer(http, request, len(data), owner, version)
        except SkyrlTinkerError as error:
            self._metrics.counted(kind, error.category, owner)
            return web.json_response(error_body(error, failure_of(error).message), status=error.status)
        except (asyncio.CancelledError, ConnectionResetError):  # the client is gone
            self._metrics.counted(kind, "cancelled", owner)
            raise
        self._metrics.counted(kind, outcome, owner)
        return response

    async def find(self, model: str, owner: OwnerId | None) -> tuple[OpenAIServer, WeightVersion | None]:
        """Return the server of a model name, and the version; None for a base model.

        Raises the store's errors.
        """
        if (server := self._of.get(model)) is not None:
            return server, None
        row, version = await self._store.read(
            lambda conn: openai_models.find_weights(conn, owner, model, self._bases)
        )
        return self._of[row.base_model], version


def _owner(http: web.Request) -> OwnerId | None:
    """Return the owner named by the API: only the API can connect."""
    owner = http.headers.get(OWNER_HEADER)
    return None if owner is None else OwnerId(int(owner))

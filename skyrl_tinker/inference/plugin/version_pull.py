"""Weight versions from another host: a sampler pulls them before it loads them."""

import asyncio
import json

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from skyrl_tinker.inference.constants import PROBE
from skyrl_tinker.inference.plugin.asgi import read_body, with_body
from skyrl_tinker.system.version_copies import VersionCopies

_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_UPDATE, _BEGIN, _FINISH = "/update_weights", "/start_weight_update", "/finish_weight_update"


class VersionPull:
    """ASGI middleware that replaces a URL of a VersionServer by the path of a local copy.

    An adapter's copy is held until it is unloaded; a copy of full parameters until the next update begins or
    this one is finished, as the engine maps the files until then.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._copies = VersionCopies()
        self._adapters: dict[str, str] = {}  # URL by name
        self._weights: set[str] = set()  # URLs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        if path == PROBE:
            await Response(status_code=204)(scope, receive, send)
        elif path in (_LOAD, _UPDATE):
            await self._with_copies(scope, receive, send)
        elif path == _UNLOAD:
            await self._unload(scope, receive, send)
        elif path in (_BEGIN, _FINISH):
            await self._app(scope, receive, send)
            await self._release_weights()
        else:
            await self._app(scope, receive, send)

    async def _with_copies(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = json.loads(await read_body(receive))
        place, key = (
            (body, "lora_path") if scope["path"] == _LOAD else (body.get("update_info", {}), "directory")
        )
        url = place.get(key)
        if isinstance(url, str) and url.startswith("http://"):
            try:
                place[key] = str(await asyncio.to_thread(self._copies.hold, url))
            except OSError as error:
                await Response(f"{url} could not be pulled: {error}", 502)(scope, receive, send)
                return
            if scope["path"] == _UPDATE:
                self._weights.add(url)
            else:
                self._adapters[body["lora_name"]] = url
        await self._app(*with_body(scope, receive, json.dumps(body).encode()), send)

    async def _unload(self, scope: Scope, receive: Receive, send: Send) -> None:
        content = await read_body(receive)
        await self._app(*with_body(scope, receive, content), send)
        url = self._adapters.pop(json.loads(content)["lora_name"], None)
        if url is not None and url not in self._adapters.values():
            await asyncio.to_thread(self._copies.release, url)

    async def _release_weights(self) -> None:
        released, self._weights = self._weights, set()
        for url in released:
            await asyncio.to_thread(self._copies.release, url)

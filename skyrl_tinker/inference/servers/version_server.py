"""Files of weight versions for samplers on other hosts, which pull them (VersionPull)."""

import asyncio
import hashlib
import hmac
import secrets
import socket
from pathlib import Path
from urllib.parse import quote

from aiohttp import web

from skyrl_tinker.system.interfaces import address_towards

SHUTDOWN_S = 1.0


class VersionServer:
    """Server of the directories that `locate` has named, each by a URL that cannot be guessed.

    It listens on this host's addresses towards other hosts, from the first call of `locate` for each.
    """

    def __init__(self, base_model: str) -> None:
        """`base_model`: its directory has the same path on every host, and is never sent."""
        self._base_model = base_model
        self._key = secrets.token_bytes(32)
        self._ports: dict[str, int] = {}  # by address
        self._opening = asyncio.Lock()
        self._runner: web.AppRunner | None = None

    async def locate(self, replica: str, directory: str) -> str:
        """Return the name of `directory` for a replica, given by its URL: the path on this host, else a URL.

        Raises OSError if the replica's host name is unknown.
        """
        if directory == self._base_model:
            return directory
        own = await asyncio.to_thread(address_towards, replica)
        if own is None:
            return directory
        async with self._opening:
            port = self._ports.get(own) or await self._listen(own)
        host = f"[{own}]" if ":" in own else own
        return f"http://{host}:{port}/{self._signature(directory)}{quote(directory)}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _listen(self, address: str) -> int:
        if self._runner is None:
            app = web.Application()
            app.add_routes([web.get("/{signature}/{directory:.+}", self._answer)])
            self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S)
            await self._runner.setup()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)
        await web.SockSite(self._runner, listener).start()
        self._ports[address] = int(listener.getsockname()[1])
        return self._ports[address]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        """List the files of a directory with their sizes, or send one of them."""
        directory = f"/{request.match_info['directory']}"
        if not hmac.compare_digest(request.match_info["signature"], self._signature(directory)):
            raise web.HTTPNotFound
        files = await asyncio.to_thread(_files, Path(directory))
        name = request.query.get("file")
        if name is None:
            return web.json_response(files)
        if name not in files:
            raise web.HTTPNotFound
        return web.FileResponse(Path(directory) / name)

    def _signature(self, directory: str) -> str:
        return hmac.new(self._key, directory.encode(), hashlib.sha256).hexdigest()


def _files(directory: Path) -> dict[str, int]:
    """Return the bytes of a version's files by name. Raises HTTPNotFound if the directory is gone."""
    if not directory.is_dir():
        raise web.HTTPNotFound
    return {file.name: file.stat().st_size for file in directory.iterdir() if file.is_file()}

"""Pages of the dashboard: static files, open to anybody because they hold no data."""

from importlib.resources import files

from fastapi import APIRouter
from starlette.datastructures import MutableHeaders
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

PAGES_URL = "/dashboard"
_FILES = files("skyrl_tinker.dashboard")
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""Headers of every file. `no-cache`: browsers ask whether it changed, as an upgrade of the server does."""

root = APIRouter(tags=["console"], include_in_schema=False)


class Pages(StaticFiles):
    """Files of the dashboard, without the package's Python."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        answer = await super().get_response("missing" if path.endswith((".py", ".pyc")) else path, scope)
        MutableHeaders(raw=answer.raw_headers).update(_HEADERS)
        return answer


def pages() -> Pages:
    """Return the files to mount at PAGES_URL."""
    return Pages(directory=str(_FILES))


@root.get("/", summary="The dashboard")
async def index() -> FileResponse:
    return FileResponse(str(_FILES / "index.html"), headers=_HEADERS)

"""Pages of dashboard and documentation: static files, open to anybody because they hold no data."""

from importlib.resources import files

from fastapi import APIRouter
from starlette.datastructures import MutableHeaders
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

PAGES_URL = "/dashboard"
DOCS_ASSETS_URL = "/docs/assets"
OPENAPI_URL = "/api/v1/openapi.json"
_FILES = files("skyrl_tinker.dashboard")


def _headers(style: str = "'self'", img: str = "'self'") -> dict[str, str]:
    """Return the headers of every file. `no-cache`: browsers ask whether it changed, as by an upgrade."""
    return {
        "Content-Security-Policy": (
            f"default-src 'none'; script-src 'self'; style-src {style}; img-src {img}; font-src 'self'; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }


root = APIRouter(tags=["console"], include_in_schema=False)


class Pages(StaticFiles):
    """Files of a directory, without a package's Python."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        if path == ".":
            return RedirectResponse("../")
        answer = await super().get_response("missing" if path.endswith((".py", ".pyc")) else path, scope)
        MutableHeaders(raw=answer.raw_headers).update(_headers())
        return answer


def pages() -> Pages:
    """Return the files to mount at PAGES_URL."""
    return Pages(directory=str(_FILES))


@root.get(PAGES_URL, summary="The same page as /")
async def elsewhere() -> RedirectResponse:
    return RedirectResponse("./")


@root.get("/", summary="The dashboard")
async def index() -> FileResponse:
    return FileResponse(str(_FILES / "index.html"), headers=_headers())


@root.get("/docs", summary="Interactive documentation of this API")
async def docs() -> FileResponse:
    """Send the page, whose scripts come from a package, to work offline; they set styles with images."""
    return FileResponse(str(_FILES / "docs.html"), headers=_headers("'self' 'unsafe-inline'", "'self' data:"))


def docs_assets() -> Pages:
    """Return the files to mount at DOCS_ASSETS_URL."""
    return Pages(directory=str(files("fastapi_offline") / "static"))

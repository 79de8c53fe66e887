"""Documentation page /docs. Its scripts come from a package, so that it works offline."""

from importlib.resources import files

from fastapi import APIRouter
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

OPENAPI_URL = "/api/v1/openapi.json"
ASSETS_URL = "/docs/assets"

root = APIRouter(tags=["health"], include_in_schema=False)


def assets() -> StaticFiles:
    """Return the files to mount at ASSETS_URL."""
    return StaticFiles(directory=str(files("fastapi_offline") / "static"))


@root.get("/docs", summary="Interactive documentation of this API")
async def docs() -> HTMLResponse:
    return get_swagger_ui_html(
        openapi_url=OPENAPI_URL,
        title="skyrl-tinker",
        swagger_js_url=f"{ASSETS_URL}/swagger-ui-bundle.js",
        swagger_css_url=f"{ASSETS_URL}/swagger-ui.css",
        swagger_favicon_url=f"{ASSETS_URL}/favicon.png",
        swagger_ui_parameters={"docExpansion": "none", "persistAuthorization": True},
    )

"""Error responses: the status of the error's class and {"detail": message}, always with a Content-Length.

The SDK treats a 400 without a Content-Length as a broken connection and sends the request again.
"""

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import DataError, DBAPIError, OperationalError
from starlette.responses import JSONResponse

from skyrl_tinker.errors import DatabaseError, OverloadedError, SkyrlTinkerError
from skyrl_tinker.protocol.schemas.base import describe
from skyrl_tinker.redaction import redact, without_paths

EXPECTED = (SkyrlTinkerError, OperationalError, DataError)
"""What `refusal` answers; the database may be full, busy or away, or a text have a NUL."""
RETRY_S = 2
_log = logging.getLogger(__name__)


def install(app: FastAPI) -> None:
    app.add_exception_handler(SkyrlTinkerError, _refuse)
    app.add_exception_handler(RequestValidationError, _refuse_parameters)
    app.add_exception_handler(OperationalError, _refuse)
    app.add_exception_handler(DataError, _refuse)
    app.add_exception_handler(404, _no_route)
    app.add_exception_handler(Exception, _internal_error)


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, EXPECTED)
    return refusal(request, error)


async def _refuse_parameters(_: Request, error: Exception) -> JSONResponse:
    """Refuse query and path parameters, which FastAPI validates; bodies are validated by our own code."""
    assert isinstance(error, RequestValidationError)
    return JSONResponse({"detail": redact("; ".join(describe(item) for item in error.errors()))}, 400)


def refusal(request: Request, error: SkyrlTinkerError | DBAPIError) -> JSONResponse:
    """Return the response for an error of our own; nothing was acknowledged where the database failed."""
    if isinstance(error, DBAPIError):  # that the database is away, the key ring logs
        cause = str(error.orig).partition("\n")[0]
        if isinstance(error, DataError):
            return JSONResponse({"detail": f"the database cannot store this: {redact(cause)}"}, 400)
        error = DatabaseError(f"the database failed, send this again: {redact(cause)}", RETRY_S)
    detail = str(error)
    if error.status >= 500 and not isinstance(error, OverloadedError):  # which may come by the thousand
        _log.error("%s %s: %s", request.method, request.url.path, error)
        detail = without_paths(detail)
    headers = {"Retry-After": str(error.retry_after_s)} if isinstance(error, OverloadedError) else None
    return JSONResponse({"detail": detail}, error.status, headers)


async def _no_route(request: Request, _: Exception) -> JSONResponse:
    """Answer the router's own 404; ours are SkyrlTinkerErrors."""
    return JSONResponse(
        {
            "detail": f"not found: no route {request.method} {redact(request.url.path)}: TINKER_BASE_URL is "
            "this server's root, without /api/v1, and /docs lists its routes"
        },
        404,
    )


async def _internal_error(request: Request, error: Exception) -> JSONResponse:
    """Answer an unexpected exception, which Starlette then raises again, so that it is logged."""
    return JSONResponse({"detail": f"internal error: {type(error).__name__}; see the server's log"}, 500)

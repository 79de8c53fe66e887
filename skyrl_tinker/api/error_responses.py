"""Error responses: the status of the error's class and {"detail": message}, always with a Content-Length.

Below OPENAI they have the form that OpenAI's clients read.

The SDK treats a 400 without a Content-Length as a broken connection and sends the request again.
"""

import logging
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import DataError, DBAPIError, OperationalError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from skyrl_tinker.errors import DatabaseError, NotFoundError, OverloadedError, SkyrlTinkerError, UserError
from skyrl_tinker.protocol.schemas.base import describe
from skyrl_tinker.protocol.schemas.openai import FieldError, error_body
from skyrl_tinker.redaction import redact, without_paths

EXPECTED = (SkyrlTinkerError, OperationalError, DataError)
"""Errors that `refusal` answers; the database may be full, busy or away, or a text have a NUL."""
OPENAI = "/oai/"
RETRY_S = 2
_log = logging.getLogger(__name__)


def install(app: FastAPI) -> None:
    app.add_exception_handler(SkyrlTinkerError, _refuse)
    app.add_exception_handler(RequestValidationError, _refuse_parameters)
    app.add_exception_handler(OperationalError, _refuse)
    app.add_exception_handler(DataError, _refuse)
    app.add_exception_handler(404, _no_route)
    app.add_exception_handler(405, _no_method)
    app.add_exception_handler(Exception, _internal_error)


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, EXPECTED)
    return refusal(request, error)


def shaped(
    path: str, error: SkyrlTinkerError, status: int | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Return the response in the form that clients of this path read; `status`: default the class's.

    Faults of the server show none of its paths, which the log has.
    """
    text = str(error) if error.status < 500 else without_paths(str(error))
    body = error_body(error, text) if path.startswith(OPENAI) else {"detail": text}
    return JSONResponse(body, error.status if status is None else status, headers)


async def _refuse_parameters(request: Request, error: Exception) -> JSONResponse:
    """Refuse query and path parameters, which FastAPI validates; bodies are validated by our own code."""
    assert isinstance(error, RequestValidationError)
    return shaped(request.url.path, UserError(describe(error.errors())))


def refusal(request: Request, error: SkyrlTinkerError | DBAPIError) -> JSONResponse:
    """Return the response for an error of our own; nothing was acknowledged where the database failed."""
    if isinstance(error, DBAPIError):  # that the database is away, the key ring logs
        cause = str(error.orig).partition("\n")[0]
        if isinstance(error, DataError) and "\0" in request.scope["path"]:
            return shaped(request.url.path, NotFoundError("the path has the character NUL, as no name has"))
        if isinstance(error, DataError):
            return shaped(request.url.path, UserError(f"the database cannot store this: {redact(cause)}"))
        error = DatabaseError(f"the database failed, send this again: {redact(cause)}", RETRY_S)
    if error.status >= 500 and not isinstance(error, OverloadedError):  # which may come by the thousand
        _log.error("%s %s: %s", request.method, request.url.path, error)
    headers = {"Retry-After": str(error.retry_after_s)} if isinstance(error, OverloadedError) else None
    return shaped(request.url.path, error, headers=headers)


async def _no_route(request: Request, _: Exception) -> JSONResponse:
    """Answer the router's own 404; ours are SkyrlTinkerErrors."""
    path = request.url.path
    root = (
        "base_url is this server's root with /oai/api/v1"
        if path.startswith(OPENAI)
        else "TINKER_BASE_URL is this server's root, without /api/v1 (for OpenAI clients with /oai/api/v1)"
    )
    message = f"not found: no route {request.method} {path}: {root}, and /docs lists its routes"
    return shaped(path, FieldError(message, "", "unknown_url"), 404)


async def _no_method(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return not_allowed(request.url.path, request.method, (error.headers or {}).get("Allow", "another"))


def not_allowed(path: str, method: str, allowed: str) -> JSONResponse:
    """Return the response to a method that this path has not; `allowed`: those that it has."""
    message = f"{path}: found {method}, expected {allowed}"
    return shaped(path, UserError(message), 405, {"Allow": allowed})


async def _internal_error(request: Request, error: Exception) -> JSONResponse:
    """Answer an unexpected exception, which Starlette then raises again, so that it is logged."""
    message = f"internal error: {type(error).__name__}; see the server's log"
    return shaped(request.url.path, SkyrlTinkerError(message))

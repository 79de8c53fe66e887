"""Request bodies, read and checked. What is large is parsed off the loop."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TypeVar

from fastapi import Request

from skyrl_tinker.api.json_text import parse_json
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.schemas import Message, parse

OFF_LOOP_BYTES = 64 * 1024

T = TypeVar("T")
M = TypeVar("M", bound=Message)


class Gate:
    """Lets a few large bodies at a time be parsed and written down, others wait.

    More would not be done sooner, but all else would wait for them: for Python's lock, in the store's queue.
    """

    def __init__(self, at_once: int) -> None:
        self._turns = asyncio.Semaphore(at_once)

    def through(self, request: Request) -> AbstractAsyncContextManager[None]:
        """Before its body, which the middleware holds and has measured, is copied from there."""
        size = int(request.headers["content-length"])
        return self._turns if size > OFF_LOOP_BYTES else nullcontext()


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """`work()`, in a thread when `size` bytes of input would hold the loop too long."""
    return await asyncio.to_thread(work) if size > OFF_LOOP_BYTES else work()


async def read_json(request: Request) -> Mapping[str, Any]:
    """The body as a JSON object. UserError when it is not one."""
    body = await request.body()
    return await off_loop(len(body), lambda: json_object(body))


async def read_model(request: Request, model: type[M]) -> M:
    """The body as `model`. UserError that names the field."""
    body = await request.body()
    return await off_loop(len(body), lambda: parse(model, json_object(body)))


def json_object(body: bytes) -> Mapping[str, Any]:
    value = parse_json(body)
    if not isinstance(value, dict):
        raise UserError(f"request body: found {type(value).__name__}, expected a JSON object")
    return value

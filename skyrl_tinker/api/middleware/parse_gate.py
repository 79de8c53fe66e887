"""Limit on how many large bodies are parsed at once."""

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext

from fastapi import Request

from skyrl_tinker.system.off_loop import OFF_LOOP_BYTES


class Gate:
    """Semaphore for parsing and storing large bodies; small ones pass freely.

    More at a time would finish no sooner, and everything else would wait for the GIL and the store's queue.
    """

    def __init__(self, at_once: int) -> None:
        self._semaphore = asyncio.Semaphore(at_once)

    def admit(self, request: Request) -> AbstractAsyncContextManager[None]:
        """Return the context in which to read and parse the body, whose Content-Length the middleware set."""
        size = int(request.headers["content-length"])
        return self._semaphore if size > OFF_LOOP_BYTES else nullcontext()

"""A limit on how many large bodies are parsed at once."""

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext

from fastapi import Request

from skyrl_tinker.off_loop import OFF_LOOP_BYTES


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

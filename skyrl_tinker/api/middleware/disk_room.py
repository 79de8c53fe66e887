"""Refusal of new work while the disk is nearly full, before its body is read.

What was accepted needs the rest: results, checkpoints, snapshots. The SDK tries a 503 again by itself.
"""

import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from skyrl_tinker.api import error_responses
from skyrl_tinker.domain.units import GB
from skyrl_tinker.errors import NoRoomError

LOOK_S = 1.0
RETRY_S = 10
NEW_WORK = frozenset(
    f"/api/v1/{name}"
    for name in (
        "create_session",
        "create_model",
        "create_sampling_session",
        "create_custom_loss",
        "load_weights",
        "forward_backward",
        "forward",
        "optim_step",
        "save_weights",
        "save_weights_for_sampler",
        "save_weights_external",
        "copy_weights",
        "asample",
    )
)


class DiskRoom:
    def __init__(self, directories: Iterable[Path], min_free_gb: float) -> None:
        self._directories = tuple(directories)
        self.least_bytes = min_free_gb * GB
        self._looked_at = 0.0
        self._shortage: str | None = None

    def shortage(self) -> str | None:
        """Return which disk has too little room, with the numbers; None: all have enough."""
        now = time.monotonic()
        if now - self._looked_at > LOOK_S:
            self._looked_at = now
            self._shortage = next(filter(None, map(self._describe, self._directories)), None)
        return self._shortage

    def free_bytes(self) -> float:
        """Return what is free on the disk with the least room."""
        return min(map(_free_bytes, self._directories))

    def _describe(self, directory: Path) -> str | None:
        free = _free_bytes(directory)
        if free >= self.least_bytes:
            return None
        return (
            f"{free / GB:.2f} GB are free at {directory}, and new work needs {self.least_bytes / GB:g} GB "
            "(setting min_free_gb): what was accepted goes on, send this again once there is room"
        )


def _free_bytes(directory: Path) -> int:
    there = next(path for path in (directory, *directory.parents) if path.exists())
    return shutil.disk_usage(there).free


class DiskRoomMiddleware:
    """ASGI layer that answers new work with 503 while there is too little room."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in NEW_WORK:
            room: DiskRoom = scope["app"].state.services.room
            if why := room.shortage():
                answer = error_responses.refusal(Request(scope), NoRoomError(why, RETRY_S))
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)

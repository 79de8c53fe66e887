"""Kills of the processes of a server, and how it comes back."""

import random
import time
from collections.abc import Callable

import psutil

from tests.support.serve import CORE, Serve
from tests.support.waiting import wait_until

HEAL_S = 180.0
ENGINE_EVERY_S = 31.0  # the supervisor gives up after five deaths within two minutes
VICTIMS = {"trainer": 5, "engine": 3, "API": 3, "vLLM server": 2, CORE: 2, "raylet": 1}
"""Kinds of processes, by how often they are killed."""


class Victims:
    """Seeded choice of the next kind to kill."""

    def __init__(self, draws: random.Random, weights: dict[str, int]) -> None:
        self._draws = draws
        self._weights = weights
        self._engine_died = 0.0

    def choose(self) -> str:
        """Return a kind; where the engine would die too soon again, wait until it may."""
        kind = self._draws.choices(list(self._weights), list(self._weights.values()))[0]
        if kind in ("engine", "raylet"):
            time.sleep(max(0.0, self._engine_died + ENGINE_EVERY_S - time.monotonic()))
            self._engine_died = time.monotonic()
        return kind

    def serve_restarted(self) -> None:
        """Note that a new supervisor counts deaths from 0."""
        self._engine_died = 0.0


def find(serve: Serve, kind: str) -> psutil.Process:
    """Return one of the kind. It may be on its way still: a server trains before its samplers are back."""
    wait_until(lambda: serve.find(kind) is not None)
    found = serve.find(kind)
    assert found is not None
    return found


def await_recovery(
    serve: Serve, kind: str, victim: psutil.Process, enough: Callable[[int], bool] = bool
) -> None:
    """Wait until the server is ready and has `enough` other processes of the kind. Raises TimeoutError."""

    def healed() -> bool:
        others = [each for each in serve.find_all(kind) if each != victim]
        return enough(len(others)) and serve.ready()

    wait_until(healed, HEAL_S)


def assert_healed(serve: Serve, kind: str, victim: psutil.Process) -> None:
    """Await recovery, and that nothing is left of what died."""
    await_recovery(serve, kind, victim)
    wait_until(lambda: not serve.unreaped())
    current = serve.tree()
    wait_until(lambda: not [each for each in serve.seen if each not in current and each.is_running()])

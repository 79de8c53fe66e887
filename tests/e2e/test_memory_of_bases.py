"""Two base models on demand, for one of which a server's memory suffices: they take turns (needs root)."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
import pytest

from skyrl_tinker.system.host_memory import CGROUPS
from tests.e2e.support.client import prompt, random_tokens
from tests.e2e.support.two_bases import served
from tests.support.serve import HEAL_S, STOP_S, Serve
from tests.support.tiny_models import write_tiny
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long

SIZE = 4_200_000_000
"""Bytes of a trainer's rank, engine, API and Ray, and of one sampler."""
TURN_S = 2 * HEAL_S
"""Time for the other's idle minute, its end, and a start, on a machine that is busy with other tests."""
TOKENS = random_tokens(40, seed=4)


@contextmanager
def limited(size: int) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Processes that are started within the context that it gives have so many bytes of memory together."""
    version_2 = (CGROUPS / "cgroup.controllers").exists()
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    path = next(path for _, names, path in lines if names == ("" if version_2 else "memory"))
    own = CGROUPS / ("" if version_2 else "memory") / path.removeprefix("/")
    group = own / f"limited-{os.getpid()}"

    @contextmanager
    def within() -> Iterator[None]:
        (group / "cgroup.procs").write_text(str(os.getpid()))
        try:
            yield
        finally:
            (own / "cgroup.procs").write_text(str(os.getpid()))

    group.mkdir()
    try:
        (group / ("memory.max" if version_2 else "memory.limit_in_bytes")).write_text(str(size))
        yield within
    finally:
        wait_until(partial(removed, group), STOP_S)


def removed(group: Path) -> bool:
    """A process that was killed is in it for another moment."""
    with suppress(OSError):
        group.rmdir()
    return not group.exists()


def bases(server: Serve) -> dict[str, tuple[str, str]]:
    """State and detail of each, by name."""
    found = httpx.get(f"{server.url}/api/v1/console/now", timeout=30).json()["server"]["base_models"]
    return {each["base_model"]: (each["state"], each["detail"]) for each in found}


def test_one_that_has_been_idle_leaves_its_memory_to_the_one_that_is_asked_for(tmp_path: Path) -> None:
    names = [str(tmp_path / name) for name in ("student", "teacher", "grader")]
    for seed, name in enumerate(names):
        write_tiny(Path(name), vocab=512, seed=seed)
    first, teacher, grader = names
    also = [word for name in names[1:] for word in ("--also", f"{name}:sample,on_demand")]
    with ExitStack() as running:
        within = running.enter_context(limited(SIZE))
        with within():
            started = served(tmp_path / "home", "--base-model", first, "--replicas", "0", *also)
            server, service = running.enter_context(started)
        samplers = [service.create_sampling_client(base_model=name).result() for name in (teacher, grader)]
        scored = samplers[0].compute_logprobs(prompt(TOKENS)).result(TURN_S)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(lambda: samplers[1].compute_logprobs(prompt(TOKENS)).result(TURN_S))
            waits = f"it waits for 1.7 GB of memory of {teacher}"
            wait_until(lambda: bases(server)[grader] == ("stopped", waits), HEAL_S)
            assert bases(server)[teacher][0] == "ready"
            other.result(TURN_S)
        assert [bases(server)[name][0] for name in names] == ["ready", "stopped", "ready"]
        again = samplers[0].compute_logprobs(prompt(TOKENS)).result(TURN_S)
        assert again[1:] == pytest.approx(scored[1:], abs=1e-3)
        assert bases(server)[grader][0] == "stopped"

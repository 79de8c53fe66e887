"""What several rooms share for the whole session because starting it costs seconds."""

import asyncio
import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from tiers.jobs import SERVER_ROOMS
from tiers.proofs import proofs

from skyrl_tinker.system.processes import freeze_gc

if TYPE_CHECKING:
    from tests.inference.support.samplers import Served
    from tests.support.postgres import Postgres

gc.disable()  # until all is imported
pytest_plugins = ["tests.support.clock", "tests.support.records"]

# The same examples each time, however slow a machine is that is busy with other tests.
settings.register_profile(
    "steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("long", settings.get_profile("steady"), max_examples=3000, derandomize=False)
settings.load_profile("steady")

ROOMS = tuple(f"tests/{room}" for rooms in SERVER_ROOMS.values() for room in rooms)
_PROVED = tuple(path for proof in proofs().values() for path in proof.tests)
_ALL_LONG = re.compile(r"^pytestmark = (\[\s*)?(pytest\.mark\.servers, )?pytest\.mark\.long\b", re.MULTILINE)
SERVER_PLACES = ("tests/e2e/", "tests/cookbook/", "tests/faults/")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Spare the imports of modules whose tests are all long, where none of them runs."""
    if not config.option.markexpr.endswith("not long") or collection_path.suffix != ".py":
        return None
    if not _ALL_LONG.search(collection_path.read_text()):
        return None
    _require_proof(collection_path.relative_to(config.rootpath).as_posix())
    return True


def _require_proof(test: str) -> None:
    if not test.startswith(_PROVED):
        raise pytest.UsageError(f"{test} is marked `long`: name it in scripts/proofs.toml")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    for item in items:
        if item.nodeid.startswith(SERVER_PLACES) or "ray_cluster" in item.fixturenames:
            item.add_marker("servers")
        if item.get_closest_marker("long"):
            _require_proof(item.nodeid)
        elif item.get_closest_marker("servers") and not item.nodeid.startswith(ROOMS):
            raise pytest.UsageError(f"{item.nodeid} uses servers: name its folder in scripts/tiers/jobs.py")


def pytest_collection_finish() -> None:
    """Spare what was imported the collections of garbage: a quarter of the time of the tests."""
    freeze_gc()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or nanobind takes what is frozen for leaks


@pytest.fixture(scope="session")
def postgres() -> Iterator["Postgres"]:
    from tests.support.postgres import postgres_server

    with postgres_server() as server:
        yield server


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """As a server's, without idle workers, and without a token file in the home directory."""
    import ray  # seconds that most rooms need not spend

    from skyrl_tinker.engine import local_ray

    settings = {
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        local_ray.start(cpus=64)  # bookkeeping: every test may have ranks and replicas
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def servers(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, "Served"]]:
    """Two real vLLM servers, tied and untied, started side by side."""
    from tests.inference.support.samplers import launch

    root = tmp_path_factory.mktemp("samplers")
    running = {name: launch(root, name) for name in ("tied", "untied")}
    for served in running.values():
        asyncio.run(served.group.ready())
    yield running
    for served in running.values():
        asyncio.run(served.group.shutdown())

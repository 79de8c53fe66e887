"""What several rooms share for the whole session because starting it costs seconds."""

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.support.postgres import Postgres, postgres_server

if TYPE_CHECKING:
    from tests.inference.support.samplers import Served

# The same examples each time, however slow a machine is that is busy with other tests.
settings.register_profile(
    "steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")

GROUPS = {
    "tests/e2e/test_external_samplers.py": "ray_cluster",
    "tests/e2e/": "server of e2e",
    "tests/training/": "ray_cluster",
    "tests/inference/": "ray_cluster",
    "tests/weight_sync/": "ray_cluster",
    "tests/engine/sampler/test_disaggregation.py": "ray_cluster",
    "tests/engine/sampler/test_fleet.py": "ray_cluster",
    "tests/engine/sampler/test_weight_swaps.py": "ray_cluster",
    "tests/engine/trainer/test_pass_preparation.py": "ray_cluster",
    "tests/cookbook/": "kitchen",
    "tests/faults/test_engine_death.py": "server of faults",
    "tests/faults/test_inflight.py": "server of faults",
    "tests/faults/test_moved_home.py": "server of faults",
    "tests/faults/test_one_api_process.py": "server of faults",
    "tests/faults/test_trainer_death.py": "server of faults",
}
"""What tests share that is slow to start, by the beginning of their ids. What takes longest comes first."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without-servers", action="store_true", help="leave out tests that start Ray or vLLM")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    if config.getoption("--without-servers"):
        slow = {item for item in items if _starts_servers(item)}
        config.hook.pytest_deselected(items=list(slow))
        items[:] = [item for item in items if item not in slow]
    # No long file at the end, with one process idle.
    order = [*GROUPS, "tests/faults/", "tests/simulation/", "tests/"]
    items.sort(
        key=lambda item: next(place for place, start in enumerate(order) if item.nodeid.startswith(start))
    )
    strays = [
        item.nodeid
        for item in items
        if "ray_cluster" in item.fixturenames and _group(item.nodeid) != "ray_cluster"
    ]
    assert not strays, "they use Ray: name them in GROUPS"


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with postgres_server() as server:
        yield server


def _starts_servers(item: pytest.Function) -> bool:
    places = ("tests/e2e/", "tests/cookbook/", "tests/faults/", "tests/scripts/test_gpu_check_serve.py")
    places += ("tests/scripts/test_cluster_up.py",)
    places += ("tests/simulation/",)  # simulated servers, too
    return item.nodeid.startswith(places) or "ray_cluster" in item.fixturenames


def _group(nodeid: str) -> str:
    """Name the tests that run in one process: those that share something, or else those of one file."""
    if nodeid.startswith("tests/faults/test_processes_end.py"):
        return nodeid  # each test starts its own server
    shared = next((shared for start, shared in GROUPS.items() if nodeid.startswith(start)), None)
    return shared or nodeid.partition("::")[0]


class GroupScheduling(LoadScopeScheduling):
    """Sends each group to one process."""

    def _split_scope(self, nodeid: str) -> str:
        return _group(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> GroupScheduling:
    """Replace --dist loadgroup: pytest 9 does not heed the ids by which pytest-xdist 3.8 tells its groups."""
    return GroupScheduling(config, log)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """No idle workers, no dashboard, no token file in the home directory."""
    import ray  # seconds that most rooms need not spend

    settings = {
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        ray.init(
            include_dashboard=False,
            num_cpus=64,  # bookkeeping: every test may have ranks and replicas
            object_store_memory=256 << 20,
            log_to_driver=False,
            logging_level="error",
        )
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

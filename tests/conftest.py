"""What several rooms share for the whole session because starting it costs seconds."""

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.inference.support.samplers import Served


TESTS = Path(__file__).parent
WITHOUT_SERVERS = 5  # the last of the orders that _group returns


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without-servers", action="store_true", help="leave out tests that start Ray or vLLM")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    """Let the tests that share something slow to start run in one process, those that take longest first."""
    if config.getoption("--without-servers"):
        slow = [item for item in items if _group(item, item.fixturenames)[0] < WITHOUT_SERVERS]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
    fixtures: dict[Path, set[str]] = defaultdict(set)
    for item in items:
        fixtures[item.path] |= set(item.fixturenames)
    groups = {item: _group(item, fixtures[item.path]) for item in items}
    items.sort(key=lambda item: groups[item][0])
    for item in items:
        item.add_marker(pytest.mark.xdist_group(groups[item][1]))


def _group(item: pytest.Function, fixtures: Collection[str]) -> tuple[int, str]:
    """Return the order of its group, and the group's name. `fixtures`: of all tests in its file."""
    folder = item.path.relative_to(TESTS).parts[0]
    if "ray_cluster" in fixtures:
        return 1, "Ray"
    if "kitchen" in fixtures:
        return 2, "cookbook"
    if "server" in fixtures and not hasattr(item.module, "server"):
        return 0 if folder == "e2e" else 3, f"server of {folder}"
    if "start" in item.fixturenames:
        return 4, item.nodeid
    return 4 if folder in ("e2e", "faults", "gpu") else WITHOUT_SERVERS, str(item.path)


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
            num_cpus=2,
            object_store_memory=256 << 20,
            log_to_driver=False,
            logging_level="error",
            _node_ip_address="127.0.0.1",
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

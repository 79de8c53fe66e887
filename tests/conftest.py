"""What several rooms share for the whole session because starting it costs seconds."""

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.inference.support.samplers import Served


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without-servers", action="store_true", help="leave out tests that start Ray or vLLM")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--without-servers"):
        started = {"ray_cluster", "servers"}
        with_servers = [item for item in items if started & set(getattr(item, "fixturenames", ()))]
        config.hook.pytest_deselected(items=with_servers)
        items[:] = [item for item in items if item not in with_servers]


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

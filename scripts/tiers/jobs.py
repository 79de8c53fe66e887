"""The processes into which scripts/test divides its work; each collects only its own tests."""

import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
SERVER_ROOMS = {
    "servers: faults": ("faults",),
    "servers: e2e": ("e2e",),
    "servers: samplers": ("inference", "weight_sync", "engine/sampler"),
    "servers: ranks": ("training", "engine/trainer", "engine/test_local_ray.py"),
}
"""Where tests with servers lie, beside the long ones. What takes longest, and waits most, comes first."""
API = sorted(each.name for each in (TESTS / "api").iterdir() if each.name != "__pycache__")
ROOMS = {
    "trainer and samplers": ("training", "inference", "weight_sync", "conformance"),
    "commands": ("cli", "scripts", "server"),
    "engine": ("engine", "simulation"),
    "API": tuple(f"api/{name}" for name in API if "." not in name),
    "API processes": tuple(f"api/{name}" for name in API if name.startswith("test_")),
    "store": ("store", "protocol"),
}
"""Tests without servers, what takes longest first; `rest` has what is not named here."""


@dataclass(frozen=True)
class Job:
    """A command. `record`: where pytest writes a line for each test, if it is pytest."""

    name: str
    command: tuple[str, ...]
    record: Path | None = None

    @property
    def has_servers(self) -> bool:
        return self.name.startswith("servers")


def pytest_job(name: str, scratch: Path, *arguments: str) -> Job:
    record = scratch / f"{name.replace(' ', '-')}.jsonl"
    return Job(name, (sys.executable, "-m", "pytest", "-q", "--record", str(record), *arguments), record)


def server_jobs(scratch: Path) -> list[Job]:
    marked = ("-m", "servers and not long")
    return [pytest_job(name, scratch, *marked, *_paths(*rooms)) for name, rooms in SERVER_ROOMS.items()]


def deterministic_jobs(scratch: Path) -> list[Job]:
    marked = ("-m", "not servers and not long")
    rooms = ROOMS | {"rest": _rest({"api", "faults", "e2e", "cookbook", *chain(*ROOMS.values())})}
    return [pytest_job(name, scratch, *marked, *_paths(*rooms)) for name, rooms in rooms.items()]


def check_jobs() -> list[Job]:
    return [
        Job("lint", ("bash", "-c", "ruff check --quiet . && ruff format --check --quiet .")),
        Job("types", ("mypy",)),
        Job("contracts", ("lint-imports",)),
        Job("site", ("scripts/site", "--quiet")),
    ]


def _rest(named: set[str]) -> tuple[str, ...]:
    """Return the other folders and files of tests."""
    found = [each.name for each in TESTS.iterdir() if each.is_dir() or each.name.startswith("test_")]
    return tuple(sorted({*found} - named - {"support", "__pycache__"}))


def _paths(*rooms: str) -> tuple[str, ...]:
    return tuple(f"tests/{room}" for room in rooms)

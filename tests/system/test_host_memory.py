"""Memory of a process, by its host and its cgroups."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import skyrl_tinker
from skyrl_tinker.system.host_memory import host_memory


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host of 10,000 bytes."""
    memory = SimpleNamespace(total=10_000, available=9000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def test_without_a_cgroup_it_is_the_hosts(tmp_path: Path) -> None:
    assert host_memory(tmp_path / "cgroup", tmp_path) == (10_000, 9000)


def test_a_cgroup_bounds_it_and_so_do_those_above(tmp_path: Path) -> None:
    (own := tmp_path / "cgroup").write_text("0::/pod/container\n")
    inner = tmp_path / "pod/container"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("400\n")
    (tmp_path / "pod/memory.max").write_text("4096\n")
    (tmp_path / "pod/memory.current").write_text("4090\n")
    assert host_memory(own, tmp_path) == (4096, 6)
    (tmp_path / "pod/memory.stat").write_text("anon 3000\nfile 1090\ninactive_file 700\nactive_file 300\n")
    assert host_memory(own, tmp_path) == (4096, 1006)
    (inner / "memory.max").write_text("1024\n")
    assert host_memory(own, tmp_path) == (1024, 624)
    (inner / "memory.max").write_text("300\n")
    assert host_memory(own, tmp_path) == (300, 0), "its limit was set below its use"


@pytest.mark.parametrize("inner", ["memory/pod/container", "memory/pod", "memory"])
def test_a_cgroup_of_version_1_bounds_it(tmp_path: Path, inner: str) -> None:
    """A container may not see the directory of its own, but that of the root, which then has its limit."""
    own = tmp_path / "cgroup"
    own.write_text("5:cpuset:/other\n4:hugetlb,memory:/pod/container\n0::/\n")
    (tmp_path / inner).mkdir(parents=True)
    (tmp_path / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    (tmp_path / "memory/memory.usage_in_bytes").write_text("9999\n")
    for name, text in (
        ("limit_in_bytes", "4096"),
        ("usage_in_bytes", "4000"),
        ("stat", "inactive_file 1\ntotal_inactive_file 2000\ntotal_active_file 500"),
    ):
        (tmp_path / inner / f"memory.{name}").write_text(f"{text}\n")
    assert host_memory(own, tmp_path) == (4096, 2596)


def test_a_file_that_cannot_be_read_is_no_limit(tmp_path: Path) -> None:
    (own := tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "memory.max").mkdir()
    assert host_memory(own, tmp_path) == (10_000, 9000)


def test_nothing_else_reads_the_memory_of_the_host() -> None:
    package = Path(skyrl_tinker.__file__).parent
    readers = [file.name for file in package.rglob("*.py") if "virtual_memory" in file.read_text()]
    assert readers == ["host_memory.py"]

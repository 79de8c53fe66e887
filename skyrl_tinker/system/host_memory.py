"""Memory of this process: that of its host, or of its cgroups, whichever is less."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

CGROUPS = Path("/sys/fs/cgroup")


class HostMemory(NamedTuple):
    """Bytes. A cache of files counts as available: the kernel frees it before it ends a process."""

    total: int
    available: int


class _Files(NamedTuple):
    """Files of a cgroup, and the keys of that cache in memory.stat."""

    limit: str
    usage: str
    cache: tuple[str, str]


_VERSION_1 = _Files(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")
)
_VERSION_2 = _Files("memory.max", "memory.current", ("active_file", "inactive_file"))


def host_memory(own_cgroup: Path = Path("/proc/self/cgroup"), cgroups: Path = CGROUPS) -> HostMemory:
    """Return the least of the host's memory and of what the limits of its cgroups leave this process."""
    host = psutil.virtual_memory()
    found = [HostMemory(host.total, host.available), *_limited(own_cgroup, cgroups)]
    return HostMemory(*map(min, zip(*found, strict=True)))


def _limited(own_cgroup: Path, cgroups: Path) -> Iterator[HostMemory]:
    """Yield the memory of each cgroup that has a limit: a process is in those above its own, too."""
    for _, controllers, path in (line.split(":", 2) for line in _read(own_cgroup).splitlines()):
        if not controllers:
            root, files = cgroups, _VERSION_2
        elif "memory" in controllers.split(","):
            root, files = cgroups / "memory", _VERSION_1
        else:
            continue
        own = root / path.removeprefix("/")
        for cgroup in (own, *own.parents[: len(own.parts) - len(root.parts)]):
            limit = _read(cgroup / files.limit)
            if limit.isdecimal():
                used = int(_read(cgroup / files.usage) or 0) - _cache(cgroup, files.cache)
                yield HostMemory(int(limit), max(0, int(limit) - used))


def _cache(cgroup: Path, keys: tuple[str, str]) -> int:
    lines = map(str.split, _read(cgroup / "memory.stat").splitlines())
    return sum(int(value) for name, value in lines if name in keys)


def _read(file: Path) -> str:
    """Return the text of a file, "" of one that is not there or cannot be read."""
    with suppress(OSError):
        return file.read_text().strip()
    return ""

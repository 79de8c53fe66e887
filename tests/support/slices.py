"""Slices of cores that processes compute in."""

import platform
import re
from pathlib import Path

SETTABLE = tuple(map(int, platform.release().split(".")[:2])) >= (6, 12)
"""Whether the kernel lets a process choose its own."""


def slice_s(pid: int | str) -> float:
    """Return the slice of a process; "thread-self": that of this thread."""
    found = re.search(r"^se.slice +: +(\d+)", Path(f"/proc/{pid}/sched").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) / 1e9

"""Work that fails before it succeeds, and disks that are full."""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def failing_first(work: Callable[..., Any], failures: list[Any]) -> Callable[..., Any]:
    """Return `work` as it raises the failures first, the last of them before the others."""

    def attempt(*arguments: Any, **named: Any) -> Any:
        if failures:
            raise failures.pop()
        return work(*arguments, **named)

    return attempt


@contextmanager
def files_up_to(size: int, pid: int = 0) -> Iterator[None]:
    """Let this process, or that of `pid`, write no file beyond so many bytes, as on a full disk."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)

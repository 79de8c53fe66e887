"""TCP listeners of this process, closed without the knowledge of the library that opened them."""

import os
import select
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FDINFO = Path("/proc/self/fdinfo")
_lock = threading.Lock()
_contexts: set[object] = set()
_before: dict[int, int] = {}
"""Listeners when the first context began."""


@contextmanager
def closing_new_listeners() -> Iterator[None]:
    """Context after which nobody can connect to the TCP ports that this process opened in it.

    For libraries such as gloo that ask peers for no token and listen on after all have met. Existing
    connections stay, newcomers are refused. It needs no privilege: a socket filter needs one on some kernels.
    Of contexts of several threads the last one closes the ports of all: members may still be on their way.
    """
    with _lock:
        if not _contexts:
            _before.update(_listeners())
        context = object()
        _contexts.add(context)
    try:
        yield
    finally:
        with _lock:
            _contexts.remove(context)
            if not _contexts:
                for inode, descriptor in _listeners().items():
                    if inode not in _before:
                        _replace(descriptor)
                _before.clear()


def _listeners() -> dict[int, int]:
    """Map inodes of listening TCP sockets to their file descriptors."""
    found = {}
    for descriptor in _descriptors():
        with suppress(OSError):  # closed just now
            status = os.fstat(descriptor)
            if stat.S_ISSOCK(status.st_mode) and _listens(descriptor):
                found[status.st_ino] = descriptor
    return found


def _descriptors() -> Iterator[int]:
    return map(int, os.listdir("/proc/self/fd"))


def _listens(descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as found:
        internet = found.family in (socket.AF_INET, socket.AF_INET6)
        return internet and bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _replace(descriptor: int) -> None:
    """Put an event that never happens in the place of a socket, also where epoll waits for it.

    So the library can still take it out of its epoll, without which gloo aborts, and close it.
    """
    watching = [each for each in _descriptors() if _waits_for(each, descriptor)]
    never = os.eventfd(0)
    os.dup2(never, descriptor, inheritable=False)
    os.close(never)
    for each in watching:
        with select.epoll.fromfd(os.dup(each)) as poll, suppress(FileExistsError):  # one epoll, two numbers
            poll.register(descriptor, 0)


def _waits_for(epoll: int, descriptor: int) -> bool:
    with suppress(OSError):  # closed just now
        return f"\ntfd: {descriptor:8d} " in (_FDINFO / str(epoll)).read_text()
    return False

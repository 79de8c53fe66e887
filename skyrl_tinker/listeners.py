"""TCP listeners of this process, closed to newcomers."""

import ctypes
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF: return 0 bytes of the packet


@contextmanager
def sealing_new_listeners() -> Iterator[None]:
    """Context after which nobody can connect to the TCP ports that this process opened in it.

    For libraries such as gloo that ask peers for no token and listen on after all have met. Existing
    connections stay. The kernel drops what arrives for a sealed port: newcomers get no answer.
    """
    before = _listeners().keys()
    try:
        yield
    finally:
        for inode, descriptor in _listeners().items():
            if inode not in before:
                _seal(descriptor)


def _listeners() -> dict[int, int]:
    """Map inodes of listening TCP sockets to their file descriptors."""
    found = {}
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # closed just now
            status = os.fstat(descriptor)
            if stat.S_ISSOCK(status.st_mode) and _listens(descriptor):
                found[status.st_ino] = descriptor
    return found


def _listens(descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as found:
        internet = found.family in (socket.AF_INET, socket.AF_INET6)
        return internet and bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _seal(descriptor: int) -> None:
    program = ctypes.create_string_buffer(_DROP_ALL)
    with socket.socket(fileno=os.dup(descriptor)) as listener:
        address = ctypes.addressof(program)
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, address))

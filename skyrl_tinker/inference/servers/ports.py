"""Ports for the processes that we start."""

import socket


def reserve_port() -> socket.socket:
    """A free port that the kernel gives to nobody else while the socket is open, but that a child can bind.

    Both sockets carry SO_REUSEADDR and this one never listens; the child binds its port seconds after it
    starts.
    """
    guard = socket.socket()
    guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    guard.bind(("127.0.0.1", 0))
    return guard

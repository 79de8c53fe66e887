"""Ports for the processes that we start."""

import socket

LOOPBACK = "127.0.0.1"


def reserve_port(host: str = LOOPBACK) -> socket.socket:
    """Reserve a free port: while the socket is open no other process gets it, but a child can bind it.

    Both sockets carry SO_REUSEADDR and this one never listens; the child binds its port seconds after it
    starts.
    """
    guard = socket.socket()
    guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    guard.bind((host, 0))
    return guard

"""Ports that are closed, beside others of the same process that are not."""

import os
import select
import socket
import subprocess
import sys

import pytest

from skyrl_tinker.system.listeners import closing_new_listeners

GLOO = """
import os, tempfile, torch
import torch.distributed as dist
from skyrl_tinker.system.listeners import closing_new_listeners

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
with tempfile.TemporaryDirectory() as place:
    with closing_new_listeners():
        dist.init_process_group("gloo", store=dist.FileStore(f"{place}/store", 1), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
print("ended")
"""
BEFORE = ["setpriv", "--bounding-set=-all"] if os.getuid() == 0 else []


def test_a_port_opened_meanwhile_keeps_its_connections_and_takes_no_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as before:
        with closing_new_listeners():
            closed = socket.create_server(("127.0.0.1", 0))
            address = closed.getsockname()
            early = socket.create_connection(address)
            accepted, _ = closed.accept()
        for here, there in ((early, accepted), (accepted, early)):
            here.sendall(b"still")
            assert there.recv(5) == b"still"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=5)
        socket.create_connection(before.getsockname(), timeout=5).close()
        for each in (closed, early, accepted):
            each.close()


def test_ports_stay_until_the_last_of_several_contexts_ends() -> None:
    first, last = closing_new_listeners(), closing_new_listeners()
    first.__enter__()
    with last:
        closed = socket.create_server(("127.0.0.1", 0))
        first.__exit__(None, None, None)
        socket.create_connection(closed.getsockname(), timeout=5).close()
        address = closed.getsockname()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=5)
    closed.close()


def test_its_owner_takes_it_out_of_its_epolls_where_it_is_never_ready() -> None:
    with select.epoll() as first, select.epoll() as second:
        copy = select.epoll.fromfd(os.dup(first.fileno()))
        with closing_new_listeners():
            closed = socket.create_server(("127.0.0.1", 0))
            for each in (first, second):
                each.register(closed, select.EPOLLIN)
        for each in (first, second):
            assert each.poll(0.05) == []
            each.unregister(closed)
        copy.close()
        closed.close()


def test_gloo_ends_in_good_order_without_privileges() -> None:
    ended = subprocess.run([*BEFORE, sys.executable, "-c", GLOO], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "ended\n"), ended.stderr

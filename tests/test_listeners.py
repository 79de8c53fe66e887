"""Ports that let nobody in any more, beside others of the same process that do."""

import socket

import pytest

from skyrl_tinker.listeners import sealing_new_listeners


def test_a_port_opened_meanwhile_keeps_its_connections_and_takes_no_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as before:
        with sealing_new_listeners():
            sealed = socket.create_server(("127.0.0.1", 0))
            early = socket.create_connection(sealed.getsockname())
            accepted, _ = sealed.accept()
        for here, there in ((early, accepted), (accepted, early)):
            here.sendall(b"still")
            assert there.recv(5) == b"still"
        with pytest.raises(TimeoutError):
            socket.create_connection(sealed.getsockname(), timeout=0.3)
        socket.create_connection(before.getsockname(), timeout=5).close()
        for each in (sealed, early, accepted):
            each.close()

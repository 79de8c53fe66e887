"""A network between a process and a server, which can be cut."""

import socket
import threading
from contextlib import suppress


class Wire:
    """Proxy before a port of this host. While it is cut, connections break and new ones do not come about."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = []
        self._cut = False
        threading.Thread(target=self._serve, daemon=True).start()

    def cut(self) -> None:
        self._cut = True
        self._break()

    def mend(self) -> None:
        self._cut = False

    def close(self) -> None:
        self._listener.close()
        self._break()

    def _break(self) -> None:
        ends, self._ends = self._ends, []
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self._cut:
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self._to))
                self._ends += (client, server)
                for one, other in ((client, server), (server, client)):
                    threading.Thread(target=_pass, args=(one, other), daemon=True).start()


def _pass(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(1 << 16):
            other.sendall(data)
    for end in (one, other):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)

"""HTTP server that gives one answer."""

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class PlainServer(ThreadingHTTPServer):
    """Answers at `path` alone, or at all. `keys`: API keys that it was sent."""

    def __init__(self, status: int, body: bytes, path: str | None) -> None:
        self.keys: list[str | None] = []

        class Handler(BaseHTTPRequestHandler):
            server: PlainServer

            def do_GET(self) -> None:
                self.server.keys.append(self.headers["X-API-Key"])
                self.send_response(status if path in (None, self.path) else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"


@contextmanager
def answering(
    status: int, body: bytes, cert: Path | None = None, key: Path | None = None, path: str | None = None
) -> Iterator[PlainServer]:
    """Serve meanwhile, with a certificate by TLS."""
    with PlainServer(status, body, path) as server:
        if cert is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(cert, key)
            server.socket = context.wrap_socket(server.socket, server_side=True)
            server.handle_error = lambda *_: None  # type: ignore[method-assign]  # of clients that refuse it
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()

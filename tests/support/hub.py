"""Hugging Face hub with one model: what huggingface_hub asks of it to list and fetch files."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NAME = "org/model"
COMMIT = "1" * 40


class Hub:
    """Serves the files of a directory. Weights come after `give_weights` only, all but their first half."""

    def __init__(self, directory: Path) -> None:
        self.files = {file.name: file.read_bytes() for file in sorted(directory.iterdir())}
        self.fetched: list[str] = []
        self.half_sent = threading.Event()
        self.weights_given = threading.Event()
        self.url = ""

    def give_weights(self) -> None:
        self.weights_given.set()

    @contextmanager
    def serve(self) -> Iterator["Hub"]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield self
        self.give_weights()
        server.shutdown()
        thread.join()
        server.server_close()

    def tree(self) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for name, content in self.files.items()
        ]


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            if path == f"/api/models/{NAME}" or path.startswith(f"/api/models/{NAME}/revision/"):
                self._send(json.dumps({"id": NAME, "sha": COMMIT, "siblings": []}).encode(), body)
            elif path == f"/api/models/{NAME}/tree/{COMMIT}":
                self._send(json.dumps(hub.tree()).encode(), body)
            elif path.startswith(f"/{NAME}/resolve/{COMMIT}/"):
                name = path.rsplit("/", 1)[1]
                self._send(hub.files[name], body, weights=name.endswith(".safetensors"))
                hub.fetched += [name] if body else []
            else:
                self.send_error(404)

        def _send(self, content: bytes, body: bool, *, weights: bool = False) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if not body:
                return
            half = len(content) // 2 if weights else 0
            self.wfile.write(content[:half])
            if weights:
                hub.half_sent.set()
                hub.weights_given.wait()
            self.wfile.write(content[half:])

    return Handler

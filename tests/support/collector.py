"""OpenTelemetry collector that keeps what it gets."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """`status`: of its answers; what it refuses is not kept."""

    def __init__(self, port: int = 0) -> None:
        self.status = 200
        self.requests: list[ExportTraceServiceRequest] = []
        self.headers: dict[str, str] = {}
        self.refused = 0
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.headers = dict(self.headers)
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/traces"
                if collector.status == 200:
                    collector.requests.append(ExportTraceServiceRequest.FromString(body))
                else:
                    collector.refused += 1
                self.send_response(collector.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for request in list(self.requests)
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]

    def trace(self, request_id: str) -> dict[str, Span]:
        """Spans of a request by name."""
        return {span.name: span for span in self.spans if span.trace_id.hex() == request_id}


@contextmanager
def collecting(port: int = 0) -> Iterator[Collector]:
    collector = Collector(port)
    thread = threading.Thread(target=collector.server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield collector
    finally:
        collector.server.shutdown()
        thread.join()
        collector.server.server_close()


def values(attributes: "Iterator[KeyValue]") -> dict[str, str | int]:
    """Attributes by name without their prefix."""
    return {
        each.key.removeprefix("skyrl_tinker."): getattr(each.value, str(each.value.WhichOneof("value")))
        for each in attributes
    }

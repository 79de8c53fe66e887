"""An S3-compatible server (moto), on a free port, with one bucket; its credentials are in the environment."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

BUCKET = "checkpoints"


class ObjectStorage:
    def __init__(self) -> None:
        self._server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        host, self._port = self._server.get_host_and_port()
        self.url = f"http://{host}:{self._port}"
        self.environment = {
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.url,
        }

    def client(self) -> Any:
        return boto3.client("s3", endpoint_url=self.url)

    def create_bucket(self) -> None:
        self.client().create_bucket(Bucket=BUCKET)

    def keys(self, prefix: str = "") -> set[str]:
        found = self.client().list_objects_v2(Bucket=BUCKET, Prefix=prefix)
        return {each["Key"] for each in found.get("Contents", [])}

    @contextmanager
    def away(self) -> Iterator[None]:
        """Nobody listens; what is stored stays."""
        self._server.stop()
        yield
        self._server = ThreadedMotoServer("127.0.0.1", self._port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        self._server.stop()


@contextmanager
def object_storage() -> Iterator[ObjectStorage]:
    server = ObjectStorage()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
            patch.delenv(name)
        server.create_bucket()
        try:
            yield server
        finally:
            server.stop()

"""Two small base models, and a server of both."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tinker

from tests.support.serve import Serve, serving
from tests.support.tiny_models import write_tiny

Models = tuple[str, str]
"""Their directories."""
Served = tuple[Serve, tinker.ServiceClient]


def write_models(directory: Path, vocab: int = 1024) -> Models:
    """A first, and a second of another family; `vocab`: of the second."""
    write_tiny(directory / "first", vocab=512)
    write_tiny(directory / "second", arch="llama", vocab=vocab, seed=1)
    return str(directory / "first"), str(directory / "second")


@contextmanager
def served(home: Path, *options: str, settings: str = "") -> Iterator[Served]:
    with (
        serving(home, "--context-length", "64", *options, settings=settings) as server,
        tinker.ServiceClient(base_url=server.url, api_key="tml-local") as service,
    ):
        yield server, service

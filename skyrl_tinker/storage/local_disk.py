"""Port of a place of checkpoints beside their directories on this host, and the one that has none."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import BinaryIO

InUse = Callable[[str], bool]
"""Tells whether a directory is being read."""


class Storage:
    """Place of checkpoints beside their directories on this host: here none, see CheckpointStorage."""

    def store(self, directory: Path) -> None:
        """Do nothing: it is where it stays."""

    def store_copy(self, directory: Path, source: Path, origin: "Storage") -> None:
        """Do nothing, as `store`."""

    def fetch(self, directory: Path) -> None:
        """Do nothing: it is there, or gone."""

    async def fetch_off_loop(self, directory: Path) -> None:
        """Do nothing, as `fetch`."""

    def open(self, directory: Path, name: str) -> BinaryIO:
        """Open a file of the directory. Raises FileNotFoundError."""
        return (directory / name).open("rb")

    def remove(self, directory: Path) -> None:
        """Do nothing: who removes the directory removes it."""

    def discard(self, directory: Path) -> None:
        """Do nothing, as `remove`."""

    def has(self, directory: Path) -> bool:
        """Return True: where it is, it stays."""
        return True

    def listed(self, pattern: str, below: Path | None = None) -> Sequence[Path]:
        """Return nothing: who sweeps sees the directories."""
        return ()

    def discard_old(self, pattern: str, unneeded: Collection[Path]) -> None:
        """Do nothing: directories appear whole, and who sweeps sees them."""

    def evict(self, limit: float, in_use: InUse) -> None:
        """Do nothing: this is no cache."""


LOCAL_DISK = Storage()
"""That of a server whose checkpoints are on this host's disk only."""

"""Port of storage: the place of checkpoints beside their directories on this host.

By default there is none, as on a server that keeps them on this host's disk only.
"""

from collections.abc import Callable, Collection, Hashable, Sequence
from pathlib import Path
from typing import BinaryIO

InUse = Callable[[str], bool]
"""Tells whether a directory is being read."""


class Storage:
    """Storage of directories with a manifest. Calls may take as long as the network does: use a thread.

    Raises StorageError, which names the place and the cause. Here: none, so that directories only stay.
    """

    def store(self, directory: Path) -> None:
        """Store a directory; nothing of it stays there after StorageError."""

    def store_copy(self, directory: Path, source: Path, origin: "Storage") -> None:
        """Store a directory that is a copy of `source`; within the storage, if `origin` has that there."""

    def fetch(self, directory: Path) -> None:
        """Make the local directory, unless it is there; harmless when the storage has none, too."""

    async def fetch_off_loop(self, directory: Path, share: Hashable = None) -> None:
        """Fetch it beside the event loop; at once if that has just found it here.

        `share`: whose turns it takes, None for the engine itself.
        """

    def open(self, directory: Path, name: str) -> BinaryIO:
        """Open a file of the directory. Raises FileNotFoundError."""
        return (directory / name).open("rb")

    def remove(self, directory: Path) -> None:
        """Remove it from storage; harmless if it is not there. The local one is its owner's to remove."""

    def discard(self, directory: Path) -> None:
        """Remove the files of a failed save, if that can be done."""

    def has(self, directory: Path) -> bool:
        """Return whether it lasts beyond the local directory; without storage that itself does."""
        return True

    def listed(self, pattern: str, below: Path | None = None) -> Sequence[Path]:
        """Return the directories of `pattern` with files that are stored, whole or not; none if it is away.

        `pattern`: of their paths relative to the root. `below`: a directory, by default the root.
        """
        return ()

    def discard_old(self, pattern: str, unneeded: Collection[Path]) -> None:
        """Remove the `unneeded` directories, and those without manifest, if they are older than a day.

        The host of these died while it stored or removed them, or before it recorded them.
        """

    def evict(self, limit: float, in_use: InUse) -> None:
        """Delete stored directories from this host, the longest unused first, until all take `limit` bytes.

        Those used within an hour stay, and those `in_use`: a load may wait for longer.
        """


LOCAL_DISK = Storage()
"""That of a server whose checkpoints are on this host's disk only."""

"""Whose turn it is to write, among the processes of one server.

SQLite lets waiting writers sleep and try again, up to 100 ms at a time, so a busy process starves the others
for seconds. A file lock wakes the next one the moment the transaction ends, and dies with its process.
"""

import fcntl


class WriteLock:
    """One holder per database file. The blocking calls are for a connection's own thread."""

    def __init__(self, database: str) -> None:
        self._file = open(f"{database}-turn", "ab")  # noqa: SIM115  (held until `close`)

    def take(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def give(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        self._file.close()

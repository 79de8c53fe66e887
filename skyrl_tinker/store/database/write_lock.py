"""Write lock among the processes of one server: a lock on a file.

SQLite lets waiting writers sleep and try again, up to 100 ms at a time, so that a busy process starves its
peers for seconds. A file lock wakes the next writer when the transaction ends, and dies with its process.
"""

import fcntl
import os


class WriteLock:
    """Lock of one database file, as a context manager. Taking it blocks: only for a thread of its own."""

    def __init__(self, database: str) -> None:
        # held until `close`; as private as the database
        self._file = os.fdopen(
            os.open(f"{database}-turn", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "ab"
        )

    def __enter__(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        self._file.close()

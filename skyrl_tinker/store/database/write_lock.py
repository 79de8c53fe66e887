"""Write lock among the processes of one server: a lock on a file.

SQLite lets waiting writers sleep and try again, up to 100 ms at a time, so that a busy process starves its
peers for seconds. A file lock wakes the next writer when the transaction ends, and dies with its process.
"""

import fcntl


class WriteLock:
    """Lock of one database file, as a context manager. Taking it blocks: only for a thread of its own."""

    def __init__(self, database: str) -> None:
        self._file = open(f"{database}-turn", "ab")  # noqa: SIM115  (held until `close`)

    def __enter__(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        self._file.close()

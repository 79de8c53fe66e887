"""Right of one server at a time to work on a database. SQLite uses the home's lock file.

On PostgreSQL it is a row of `server_state`: its holder and an epoch, which grows whenever it is taken. A
holder counts its `beats`; who sees none for HOLD_S takes the lease, so no clocks are compared. A late
commit of the holder before is refused by its epoch, in the same transaction: it may have stood still, or
been cut off, and not know.
"""

import secrets
import socket
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from skyrl_tinker.errors import LeaseLostError, StartupError
from skyrl_tinker.store import server_state
from skyrl_tinker.store.database.abstract_database import Database
from skyrl_tinker.store.database.opening import file_of, open_database

HOLD_S = 20.0
_LOOK_S = 1.0
_ID = "server-id"
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """`holder` None: it was let go. `epoch`: of the last one who took it."""

    epoch: int
    holder: str | None
    beats: int = 0


def read(conn: Connection) -> LeaseRow | None:
    """Return the row, None if nobody has ever taken the lease."""
    value = server_state.get(conn, server_state.LEASE)
    return None if value is None else LeaseRow(**value)


def holder_of(home: Path) -> str:
    """Return the lasting name of the server of a home, by which one that was killed takes its lease again."""
    file = home / "run" / _ID
    if not file.exists():
        file.write_text(secrets.token_hex(4))
    return f"{socket.gethostname()}:{home} ({file.read_text()})"


def own_epoch(url: str, home: Path) -> int | None:
    """Return the epoch that the server of a home holds; None for a file. LeaseLostError if it holds none."""
    if file_of(url) is not None:
        return None
    with closing(open_database(url, home)) as database:
        row = _read(database)
    if row is None or row.holder != holder_of(home):
        raise LeaseLostError(f"database_url: this server does not hold the lease, but {_holder(row)}")
    return row.epoch


class Lease:
    """Lease of a server on the database of `url`. Its methods block."""

    def __init__(
        self,
        url: str,
        home: Path,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._database = None if file_of(url) is not None else open_database(url, home)
        self._holder = "" if self._database is None else holder_of(home)
        self._clock = clock
        self._sleep = sleep
        self.epoch: int | None = None  # None: the database is a file, or it is not taken

    def take(self, progress: Report, *, standby: bool = False) -> None:
        """Take it, if need be after HOLD_S without a beat of its holder.

        Raises StartupError as soon as there is one; `standby`: then it waits. The tables must be there.
        """
        while self._database is not None and self.epoch is None:
            try:
                self._take(self._database, progress, standby=standby)
            except OperationalError as error:
                if not standby:
                    raise StartupError(f"database_url: cannot connect: {error.orig}") from error
                progress(f"the database does not answer, trying again: {error.orig}")
                self._sleep(_LOOK_S)

    def keep(self) -> None:
        """Count a beat. Raises LeaseLostError, and OperationalError while the database is away."""
        if self._database is not None:
            self._change(self._database, lambda row: LeaseRow(row.epoch, row.holder, row.beats + 1))

    def close(self) -> None:
        """Let it go, if it is held and the database answers."""
        if self._database is not None and self.epoch is not None:
            with suppress(OperationalError, LeaseLostError):
                self._change(self._database, lambda row: LeaseRow(row.epoch, None))
            self._database.close()

    def _take(self, database: Database, progress: Report, *, standby: bool) -> None:
        """Watch the lease and take it. Raises OperationalError: then the beats seen do not count."""
        seen, since, told = _read(database), self._clock(), False
        while not (self._is_free(seen) or self._clock() - since > HOLD_S):
            if not told:
                wait = "waiting for its end" if standby else f"waiting {HOLD_S:.0f} s for a sign of life"
                progress(f"the lease on the database has {_holder(seen)}; {wait}")
                told = True
            self._sleep(_LOOK_S)
            row = _read(database)
            if row != seen:
                if not (standby or self._is_free(row)):
                    raise StartupError(
                        f"database_url: another server works on this database: {_holder(row)}; stop it, or "
                        "wait for it with --standby"
                    )
                seen, since = row, self._clock()
        if told:
            silent = "has let go" if self._is_free(seen) else f"gave no sign of life for {HOLD_S:.0f} s"
            progress(f"{time.strftime('%F %T')} the holder of the lease {silent}, taking over")
        self._grab(database, seen)

    def _is_free(self, row: LeaseRow | None) -> bool:
        return row is None or row.holder in (None, self._holder)

    def _grab(self, database: Database, seen: LeaseRow | None) -> None:
        """Take it unless it has changed."""
        with database.connect() as conn, database.writing(conn):
            if read(conn) == seen:
                mine = LeaseRow(1 if seen is None else seen.epoch + 1, self._holder)
                server_state.put(conn, server_state.LEASE, asdict(mine))
                self.epoch = mine.epoch

    def _change(self, database: Database, change: Callable[[LeaseRow], LeaseRow]) -> None:
        with database.connect() as conn, database.writing(conn):
            row = read(conn)
            if row is None or row.epoch != self.epoch:
                raise LeaseLostError(f"database_url: another server has taken over: {_holder(row)}")
            server_state.put(conn, server_state.LEASE, asdict(change(row)))


def _read(database: Database) -> LeaseRow | None:
    with database.connect() as conn, database.reading(conn):
        return read(conn)


def _holder(row: LeaseRow | None) -> str:
    return "nobody" if row is None or row.holder is None else row.holder

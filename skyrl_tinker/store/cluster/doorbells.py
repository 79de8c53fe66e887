"""The doorbell of a database's kind."""

from pathlib import Path

from skyrl_tinker.store.cluster.notify_bell import NotifyBell
from skyrl_tinker.store.database.opening import file_of
from skyrl_tinker.store.doorbell import Doorbell, Role, SocketBell


def bind_doorbell(url: str, home: Path, role: Role) -> Doorbell:
    """Return the bell of a process: of those of a home where the database is a file, else of all.

    Raises StartupError where it cannot be.
    """
    return NotifyBell(url, role) if file_of(url) is None else SocketBell.bind(home, role)

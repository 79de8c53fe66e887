"""Settings of the server that works on a database, in its store, for API processes on other hosts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from skyrl_tinker import __version__
from skyrl_tinker.config import Settings
from skyrl_tinker.errors import StartupError
from skyrl_tinker.store import server_state
from skyrl_tinker.store.cluster.signing_secrets import SigningSecrets, require_copy

_OWN = {
    "home",
    "host",
    "api_processes",
    "port",
    "allowed_hosts",
    "tls_cert",
    "tls_key",
    "insecure",
    "standby",
    "database_url",
}
"""Settings that each host has for itself."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """`settings`: of the server. `home`: its home, which paths in rows are relative to."""

    home: Path
    settings: dict[str, Any]

    def joined(self, own: Settings) -> Settings:
        """Return the server's settings, but for those that were given here, and those of a host."""
        given = {
            name: self.settings[name] | value if isinstance(value, dict) else value  # of a table some keys
            for name, value in own.model_dump(exclude_unset=True).items()
        }
        return Settings.model_validate(self.settings | given)


def publish(conn: Connection, settings: Settings) -> None:
    """Write down the settings, and the mark that tells the home's secrets from others."""
    shared = settings.model_dump(mode="json", exclude=_OWN) | _places(settings)
    value = {"version": __version__, "home": str(settings.root), "settings": shared}
    server_state.put(conn, server_state.SETTINGS, value)
    fingerprint = SigningSecrets(settings.root).current.fingerprint
    server_state.put(conn, server_state.SECRETS, fingerprint)


def require_same_places(conn: Connection, own: Settings) -> None:
    """Refuse a standby without the files of the server that has worked on the database. StartupError."""
    server = read(conn)
    if server is None:
        return
    require_copy(own.root, server_state.get(conn, server_state.SECRETS))
    for name, place in _places(own).items():
        if server.settings[name] != place:
            raise StartupError(
                f"--standby: found {name} {place}, expected those of the server, {server.settings[name]}"
            )


def _places(settings: Settings) -> dict[str, str | None]:
    snapshots = settings.snapshot_url or (settings.snapshots and str(Path(settings.snapshots).absolute()))
    return {"checkpoints": settings.checkpoint_url or str(settings.checkpoint_root), "snapshots": snapshots}


def read(conn: Connection) -> ServerSettings | None:
    """Return a server's settings, None before it wrote them. Raises StartupError for another version's."""
    value = server_state.get(conn, server_state.SETTINGS)
    if value is None:
        return None
    if value["version"] != __version__:
        raise StartupError(
            f"the server on this database is skyrl-tinker {value['version']}, this is {__version__}: "
            "install the same version on all hosts"
        )
    return ServerSettings(Path(value["home"]), value["settings"])

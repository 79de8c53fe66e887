"""Secrets that sign JWTs and download URLs, in a file of the home that only its user reads.

They are in no database, hence in no backup of it. All API processes of a home share the file; other hosts
have a copy of it.
"""

import hashlib
import hmac
import json
import logging
import os
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from skyrl_tinker.errors import StartupError

ENGINE_HEADER = "X-Skyrl-Tinker-Engine"
"""Header with the engine's token in requests to it from other hosts."""
FILE = "signing-secrets.json"
_BYTES = 32
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Secrets:
    jwt: bytes
    download: bytes

    @property
    def engine_token(self) -> str:
        """Token that API processes on other hosts show to the engine."""
        return self._derived(b"token of the engine")

    @property
    def fingerprint(self) -> str:
        """Text that tells whether two hosts have the same secrets; not a secret itself."""
        return self._derived(b"fingerprint")

    def _derived(self, purpose: bytes) -> str:
        return hmac.new(self.jwt + self.download, purpose, hashlib.sha256).hexdigest()


def rotate(home: Path) -> Secrets:
    """Replace the secrets: old signatures are worthless as soon as the servers notice."""
    scratch = _write_scratch(home)
    scratch.replace(home / FILE)
    return SigningSecrets(home).current


def require_copy(home: Path, fingerprint: str | None) -> None:
    """Refuse a home without the secrets of the server that works on the database, which `fingerprint` tells.

    Also a copy that others may read. Raises StartupError.
    """
    file = home / FILE
    if file.exists() and (mode := file.stat().st_mode & 0o777) & 0o077:
        raise StartupError(f"{file}: found mode {mode:o}, by which others may read it; chmod 600 {file}")
    if fingerprint is None or (file.exists() and SigningSecrets(home).current.fingerprint == fingerprint):
        return
    found = "other ones" if file.exists() else "none"
    raise StartupError(
        f"{file}: found {found}, expected the secrets of the server that works on this database; copy {FILE} "
        "from its home, which the other hosts sign and check tokens and URLs with"
    )


class SigningSecrets:
    """Secrets of a home, made by the first process that needs them; `refresh` notices new ones.

    Once they are read, a file that is gone or not complete, as one that is being copied, changes nothing: new
    ones would be worth nothing on the other hosts.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._read: tuple[int, int] | None = None  # inode and time of the file that was read
        self._current = Secrets(b"", b"")
        self._told = ""

    @property
    def current(self) -> Secrets:
        """Secrets as of the last refresh."""
        if self._read is None:
            self.refresh()
        return self._current

    def refresh(self) -> bool:
        """Read the file if it was replaced. Returns True if it was; StartupError if the first is damaged."""
        file = self._home / FILE
        if self._read is None and not file.exists():
            self._create()
        try:
            status = file.stat()
            if (status.st_ino, status.st_mtime_ns) == self._read:
                return False
            values = json.loads(file.read_text())
            self._current = Secrets(**{name: bytes.fromhex(value) for name, value in values.items()})
        except (OSError, ValueError, TypeError, AttributeError) as error:
            if self._read is None:
                raise StartupError(f"{file}: found no signing secrets ({error})") from error
            self._tell(f"{file} cannot be read, going on with the secrets from before: {error}")
            return False
        self._read = (status.st_ino, status.st_mtime_ns)
        return True

    def _tell(self, what: str) -> None:
        """Log a warning, unless it was the last one."""
        if what != self._told:
            _log.warning("%s", what)
        self._told = what

    def _create(self) -> None:
        """Link the file into its place: of two processes at once one wins, and both read the same."""
        scratch = _write_scratch(self._home)
        with suppress(FileExistsError):
            os.link(scratch, self._home / FILE)
        scratch.unlink()


def _write_scratch(home: Path) -> Path:
    fresh = asdict(Secrets(secrets.token_bytes(_BYTES), secrets.token_bytes(_BYTES)))
    scratch = home / f".{FILE}.{secrets.token_hex(4)}"
    with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump({name: value.hex() for name, value in fresh.items()}, file)
        file.flush()
        os.fsync(file.fileno())
    return scratch

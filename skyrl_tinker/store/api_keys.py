"""API keys, of which the store keeps only the SHA-256.

A key has 256 random bits, too many to guess: slow, salted hashes are for passwords that people choose. (NIST
SP 800-63B, 5.1.2.2: secrets of at least 112 bits of entropy are hashed with an approved one-way function.)
"""

import hashlib
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from sqlalchemy import Connection, func, insert, or_, select, update

from skyrl_tinker.domain.ids import OwnerId
from skyrl_tinker.errors import NotFoundError, UserError
from skyrl_tinker.store import audit_log, owners, server_state
from skyrl_tinker.store.database.rows import database_time, insert_id
from skyrl_tinker.store.database.tables import ApiKey

PREFIX = "tml-"
"""Prefix of keys: the SDK refuses anything else but JWTs."""
DEFAULT = "default"
"""Value of a limit that a key shall not have of its own."""
NO_KEY = "none"
"""Names, as a former key, the work done without one."""
MOST_OVERLAP_S = 7 * 86400
"""Time for which a key may have two secrets: else one who rotated it could act as its holder for years."""
_BYTES = 32
_ID = re.compile(r"[0-9]{1,18}", re.ASCII)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._@+-]{0,63}", re.ASCII)
_CHANGES = "key_changes"  # number of changes so far, by which other processes notice one

End = Literal["revoked", "expired", "replaced"]


@dataclass(frozen=True, slots=True)
class KeyRow:
    """One key. `previous_until`: end of the secret before the last rotation.

    Times are UTC seconds by the database's clock.
    """

    id: OwnerId
    name: str
    created_at: float
    revoked_at: float | None
    expires_at: float | None
    previous_until: float | None
    last_used_at: float | None
    admin: bool
    limits: Mapping[str, Any] | None

    def is_live(self, now: float) -> bool:
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


@dataclass(frozen=True, slots=True)
class Secret:
    """Secret of a key, valid before `until` (None: for ever), when it is or was ended by `end`."""

    key: KeyRow
    until: float | None
    end: End | None


_COLUMNS = tuple(getattr(ApiKey, field.name) for field in fields(KeyRow))


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def create(
    conn: Connection,
    name: str,
    *,
    expires_at: float | None = None,
    admin: bool = False,
    by: str | None = None,
) -> str:
    """Create a key and return it: only its hash is stored.

    `by`, here and below: the name of the key that asks, None: the command line does.
    Raises UserError for a name of another form, or the name of a live key.
    """
    if not _NAME.fullmatch(name):
        raise UserError(
            f"name: found {name!r}, expected a letter, then up to 63 letters, digits or any of '. _ @ + -'"
        )
    if _by_name(conn, name) is not None:
        raise UserError(f"name: found {name!r}, which a live key has: revoke that one, or take another name")
    key = _new_key()
    row = {"name": name, "hash": digest(key), "created_at": database_time(conn)}
    key_id = insert_id(conn, insert(ApiKey), {**row, "expires_at": expires_at, "admin": admin})
    _note(conn, "key_create", key_id, by, admin=admin, expires_at=expires_at)
    return key


def rotate(
    conn: Connection,
    id_or_name: str,
    overlap_s: float,
    *,
    expires_at: float | None = None,
    by: str | None = None,
) -> str:
    """Return a new secret for a live key; the one before is valid for `overlap_s`, older ones no longer.

    `expires_at`: the key's new expiry, None: as it was. Raises NotFoundError, and UserError for an overlap
    above MOST_OVERLAP_S.
    """
    if overlap_s > MOST_OVERLAP_S:
        raise UserError(f"overlap: found {overlap_s:.0f} s, expected at most {MOST_OVERLAP_S} s (7 days)")
    row = find_live(conn, id_or_name)
    key, until = _new_key(), database_time(conn) + overlap_s
    changes = {"previous_hash": ApiKey.hash, "previous_until": until, "hash": digest(key)}
    expiry = row.expires_at if expires_at is None else expires_at
    conn.execute(update(ApiKey).where(ApiKey.id == row.id).values(**changes, expires_at=expiry))
    _note(conn, "key_rotate", row.id, by, previous_until=until, expires_at=expiry)
    return key


def revoke(conn: Connection, id_or_name: str, by: str | None = None) -> KeyRow:
    """Revoke a live key, given by id or name. Raises NotFoundError."""
    row = find_live(conn, id_or_name)
    conn.execute(update(ApiKey).where(ApiKey.id == row.id).values(revoked_at=database_time(conn)))
    _note(conn, "key_revoke", row.id, by)
    return row


def adopt(conn: Connection, heir: str, former: str, by: str | None = None) -> int:
    """Give a live key the sessions of a revoked or expired one, given by id or name. Returns how many.

    `former` NO_KEY: the sessions that were created without a key. Raises NotFoundError, and UserError if the
    former key is live, or if several had the name.
    """
    row = find_live(conn, heir)
    owner = None if former == NO_KEY else find_dead(conn, former).id
    count = owners.give(conn, owner, row.id)
    _note(conn, "key_adopt", row.id, by, former_key=owner, sessions=count)
    return count


def limit(
    conn: Connection, id_or_name: str, changes: Mapping[str, Any], by: str | None = None
) -> Mapping[str, Any]:
    """Change the limits of a live key, by name, and return those that it has of its own.

    None: no limit, DEFAULT: again that of all keys. Raises NotFoundError.
    """
    row = find_live(conn, id_or_name)
    merged = {**(row.limits or {}), **changes}
    limits = {name: value for name, value in merged.items() if value != DEFAULT}
    conn.execute(update(ApiKey).where(ApiKey.id == row.id).values(limits=limits))
    _note(conn, "key_limit", row.id, by, limits=limits)
    return limits


def note_use(conn: Connection, used: Mapping[OwnerId, float]) -> None:
    """Record when keys were last used; an earlier time changes nothing."""
    for key_id, at in used.items():
        earlier = or_(ApiKey.last_used_at.is_(None), ApiKey.last_used_at < at)
        conn.execute(update(ApiKey).where(ApiKey.id == key_id, earlier).values(last_used_at=at))


def list_keys(conn: Connection) -> list[KeyRow]:
    """Return all keys, revoked and expired ones too, oldest first."""
    return [_key(row) for row in conn.execute(select(*_COLUMNS).order_by(ApiKey.id))]


def secrets_by_digest(conn: Connection) -> dict[bytes, Secret]:
    """Return all secrets by digest, those that ended too; of each key the present and the previous one."""
    rows = conn.execute(select(*_COLUMNS, ApiKey.hash, ApiKey.previous_hash))
    return {value: secret for row in rows for value, secret in _secrets(_key(row), *row[-2:])}


def count_changes(conn: Connection) -> int:
    """Return the number of changes of keys so far: an equal one means unchanged keys."""
    return int(server_state.get(conn, _CHANGES) or 0)


def count_keys(conn: Connection) -> int:
    """Return how many keys were created, with those that have ended."""
    return conn.scalar(select(func.count()).select_from(ApiKey)) or 0


def find_live(conn: Connection, id_or_name: str) -> KeyRow:
    """Return a live key, given by id or name. Raises NotFoundError."""
    row = _by_id(conn, id_or_name) if _ID.fullmatch(id_or_name) else _by_name(conn, id_or_name)
    if row is None or not row.is_live(database_time(conn)):
        raise NotFoundError(f"no live key {id_or_name!r}: see `skyrl-tinker keys list`")
    return row


def find_dead(conn: Connection, id_or_name: str) -> KeyRow:
    """Return a revoked or expired key, given by id or name.

    Raises NotFoundError, and UserError if it is live, or if several had the name.
    """
    by_id = _by_id(conn, id_or_name)
    named = [by_id] if by_id else [row for row in list_keys(conn) if row.name == id_or_name]
    if not named:
        raise NotFoundError(f"no key {id_or_name!r}: see `skyrl-tinker keys list`")
    dead = [row for row in named if not row.is_live(database_time(conn))]
    if not dead:
        (row,) = named
        raise UserError(f"key {row.id} ({row.name}) is live: revoke it first")
    if len(dead) > 1:
        ids = ", ".join(str(row.id) for row in dead)
        raise UserError(f"keys {ids} were called {id_or_name!r}: give the id")
    return dead[0]


def _new_key() -> str:
    return PREFIX + secrets.token_urlsafe(_BYTES)


def _note(conn: Connection, event: str, key_id: int, by: str | None, **details: Any) -> None:
    """Record an event of a key, and that the keys changed."""
    audit_log.record_key(conn, event, OwnerId(key_id), by=by, **details)
    server_state.put(conn, _CHANGES, count_changes(conn) + 1)


def _secrets(row: KeyRow, current: bytes, previous: bytes | None) -> Iterator[tuple[bytes, Secret]]:
    ends: list[tuple[float, End]] = []
    if row.revoked_at is not None:
        ends.append((row.revoked_at, "revoked"))
    if row.expires_at is not None:
        ends.append((row.expires_at, "expired"))
    yield current, Secret(row, *min(ends, default=(None, None)))
    if previous is not None and row.previous_until is not None:
        yield previous, Secret(row, *min([*ends, (row.previous_until, "replaced")]))


def _by_name(conn: Connection, name: str) -> KeyRow | None:
    """Return the live key of this name, None without one."""
    unexpired = or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > database_time(conn))
    live = ApiKey.name == name, ApiKey.revoked_at.is_(None), unexpired
    row = conn.execute(select(*_COLUMNS).where(*live)).one_or_none()
    return None if row is None else _key(row)


def _by_id(conn: Connection, key_id: str) -> KeyRow | None:
    if not _ID.fullmatch(key_id):
        return None
    row = conn.execute(select(*_COLUMNS).where(ApiKey.id == int(key_id))).one_or_none()
    return None if row is None else _key(row)


def _key(row: Any) -> KeyRow:
    return KeyRow(*row[: len(_COLUMNS)])

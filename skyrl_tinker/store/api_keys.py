"""API keys, of which the store keeps only the SHA-256.

A key has 256 random bits, too many to guess: slow, salted hashes are for passwords that people choose. (NIST
SP 800-63B, 5.1.2.2: secrets of at least 112 bits of entropy are hashed with an approved one-way function.)
"""

import hashlib
import re
import secrets
import time
from dataclasses import dataclass

from sqlalchemy import Connection, func, insert, select, update

from skyrl_tinker.domain.ids import OwnerId
from skyrl_tinker.errors import NotFoundError, UserError
from skyrl_tinker.store.database.rows import insert_id
from skyrl_tinker.store.database.tables import ApiKey

PREFIX = "tml-"
"""Prefix of keys: the SDK refuses anything else but JWTs."""
LOCAL_OWNER = "local"
"""Owner of all rows on a server without keys."""
_BYTES = 32
_ID = re.compile(r"[0-9]{1,18}", re.ASCII)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._@+-]{0,63}", re.ASCII)


@dataclass(frozen=True, slots=True)
class KeyRow:
    """One key, live if `revoked_at` is None. Times are UTC seconds since the epoch."""

    id: OwnerId
    name: str
    created_at: float
    revoked_at: float | None


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def create(conn: Connection, name: str) -> str:
    """Create a key and return it: only its hash is stored.

    Raises UserError for a name of another form, or the name of a live key.
    """
    if not _NAME.fullmatch(name):
        raise UserError(
            f"name: found {name!r}, expected a letter, then up to 63 letters, digits or any of '. _ @ + -'"
        )
    if _find_live(conn, name) is not None:
        raise UserError(f"name: found {name!r}, which a live key has: revoke that one, or take another name")
    key = PREFIX + secrets.token_urlsafe(_BYTES)
    insert_id(conn, insert(ApiKey), {"name": name, "hash": digest(key), "created_at": time.time()})
    return key


def revoke(conn: Connection, id_or_name: str) -> KeyRow:
    """Revoke a live key, given by id or name. Raises NotFoundError."""
    key_id = int(id_or_name) if _ID.fullmatch(id_or_name) else _find_live(conn, id_or_name)
    end = (
        update(ApiKey).where(ApiKey.id == key_id, ApiKey.revoked_at.is_(None)).values(revoked_at=time.time())
    )
    if key_id is None or not conn.execute(end).rowcount:
        raise NotFoundError(f"no live key {id_or_name!r}: see `skyrl-tinker keys list`")
    return next(row for row in list_keys(conn) if row.id == key_id)


def list_keys(conn: Connection) -> list[KeyRow]:
    """Return all keys, revoked ones too, oldest first."""
    query = select(ApiKey.id, ApiKey.name, ApiKey.created_at, ApiKey.revoked_at).order_by(ApiKey.id)
    return [KeyRow(OwnerId(row.id), row.name, row.created_at, row.revoked_at) for row in conn.execute(query)]


def live_by_digest(conn: Connection) -> dict[bytes, KeyRow]:
    """Return the live keys by digest."""
    columns = ApiKey.id, ApiKey.name, ApiKey.created_at, ApiKey.hash
    rows = conn.execute(select(*columns).where(ApiKey.revoked_at.is_(None)))
    return {row.hash: KeyRow(OwnerId(row.id), row.name, row.created_at, None) for row in rows}


def count_keys(conn: Connection) -> tuple[int, int]:
    """Return how many keys were created, and how many of them are revoked.

    Keys are never deleted or restored, so equal counts mean unchanged keys.
    """
    row = conn.execute(select(func.count(), func.count(ApiKey.revoked_at)).select_from(ApiKey)).one()
    return row[0], row[1]


def live_id(conn: Connection, name: str) -> OwnerId:
    """Return the id of the live key of this name. Raises NotFoundError."""
    key_id = _find_live(conn, name)
    if key_id is None:
        raise NotFoundError(f"no live key {name!r}: see `skyrl-tinker keys list`")
    return OwnerId(key_id)


def owner_name(conn: Connection, owner: OwnerId | None) -> str:
    """Return the name of the owner's key, LOCAL_OWNER without keys."""
    return conn.scalar(select(ApiKey.name).where(ApiKey.id == owner)) or LOCAL_OWNER


def _find_live(conn: Connection, name: str) -> int | None:
    return conn.scalar(select(ApiKey.id).where(ApiKey.name == name, ApiKey.revoked_at.is_(None)))

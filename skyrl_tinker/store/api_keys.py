"""API keys. The store knows a key by its SHA-256 only.

A key has 256 random bits, which nobody finds by trying: slow, salted hashes are for what people choose. (NIST
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
"""The SDK refuses anything else, but for JWTs."""
LOCAL_OWNER = "local"
"""Who owns what is made on a server without keys."""
_BYTES = 32
_ID = re.compile(r"[0-9]{1,18}", re.ASCII)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._@+-]{0,63}", re.ASCII)


@dataclass(frozen=True, slots=True)
class KeyRow:
    """`revoked_at` None: it is live. Times are UTC seconds since the epoch."""

    id: OwnerId
    name: str
    created_at: float
    revoked_at: float | None


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def create(conn: Connection, name: str) -> str:
    """A new key: this is the only time that anybody sees it.

    UserError for a name of another form, or one that a live key has.
    """
    if not _NAME.fullmatch(name):
        raise UserError(
            f"name: found {name!r}, expected a letter, then up to 63 letters, digits or any of '. _ @ + -'"
        )
    if _live_id(conn, name) is not None:
        raise UserError(f"name: found {name!r}, which a live key has: revoke that one, or take another name")
    key = PREFIX + secrets.token_urlsafe(_BYTES)
    insert_id(conn, insert(ApiKey), {"name": name, "hash": digest(key), "created_at": time.time()})
    return key


def revoke(conn: Connection, which: str) -> KeyRow:
    """By id or by name. NotFoundError if no live key is that."""
    key_id = int(which) if _ID.fullmatch(which) else _live_id(conn, which)
    end = (
        update(ApiKey).where(ApiKey.id == key_id, ApiKey.revoked_at.is_(None)).values(revoked_at=time.time())
    )
    if key_id is None or not conn.execute(end).rowcount:
        raise NotFoundError(f"no live key {which!r}: see `skyrl-tinker keys list`")
    return next(row for row in list_keys(conn) if row.id == key_id)


def list_keys(conn: Connection) -> list[KeyRow]:
    """Revoked ones, too; oldest first."""
    query = select(ApiKey.id, ApiKey.name, ApiKey.created_at, ApiKey.revoked_at).order_by(ApiKey.id)
    return [KeyRow(OwnerId(row.id), row.name, row.created_at, row.revoked_at) for row in conn.execute(query)]


def live_by_digest(conn: Connection) -> dict[bytes, KeyRow]:
    """By digest."""
    columns = ApiKey.id, ApiKey.name, ApiKey.created_at, ApiKey.hash
    rows = conn.execute(select(*columns).where(ApiKey.revoked_at.is_(None)))
    return {row.hash: KeyRow(OwnerId(row.id), row.name, row.created_at, None) for row in rows}


def count_keys(conn: Connection) -> tuple[int, int]:
    """How many were ever made, and how many of them are revoked: none is deleted and none comes back, so
    while these are the same all is."""
    row = conn.execute(select(func.count(), func.count(ApiKey.revoked_at)).select_from(ApiKey)).one()
    return row[0], row[1]


def live_id(conn: Connection, name: str) -> OwnerId:
    """Of the live key of this name. NotFoundError."""
    found = _live_id(conn, name)
    if found is None:
        raise NotFoundError(f"no live key {name!r}: see `skyrl-tinker keys list`")
    return OwnerId(found)


def owner_name(conn: Connection, owner: OwnerId | None) -> str:
    """What an owner is called; LOCAL without keys."""
    return conn.scalar(select(ApiKey.name).where(ApiKey.id == owner)) or LOCAL_OWNER


def _live_id(conn: Connection, name: str) -> int | None:
    return conn.scalar(select(ApiKey.id).where(ApiKey.name == name, ApiKey.revoked_at.is_(None)))

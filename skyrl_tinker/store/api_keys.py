"""API keys. The store knows a key by its SHA-256 only.

A key has 256 random bits, which nobody finds by trying: slow, salted hashes are for what people choose. (NIST
SP 800-63B, 5.1.2.2: secrets of at least 112 bits of entropy are hashed with an approved one-way function.)
"""

import hashlib
import re
import secrets
import time
from dataclasses import dataclass

from sqlalchemy import func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from skyrl_tinker.domain.ids import OwnerId
from skyrl_tinker.errors import NotFoundError, UserError
from skyrl_tinker.store.database.rows import insert_id
from skyrl_tinker.store.database.tables import ApiKey

PREFIX = "tml-"
"""The SDK refuses anything else, but for JWTs."""
LOCAL = "local"
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


async def create(conn: AsyncConnection, name: str) -> str:
    """A new key: this is the only time that anybody sees it.

    UserError for a name of another form, or one that a live key has.
    """
    if not _NAME.fullmatch(name):
        raise UserError(
            f"name: found {name!r}, expected a letter, then up to 63 letters, digits or any of '. _ @ + -'"
        )
    if await _live_id(conn, name) is not None:
        raise UserError(f"name: found {name!r}, which a live key has: revoke that one, or take another name")
    key = PREFIX + secrets.token_urlsafe(_BYTES)
    await insert_id(conn, insert(ApiKey), {"name": name, "hash": digest(key), "created_at": time.time()})
    return key


async def revoke(conn: AsyncConnection, which: str) -> KeyRow:
    """By id or by name. NotFoundError if no live key is that."""
    key_id = int(which) if _ID.fullmatch(which) else await _live_id(conn, which)
    end = (
        update(ApiKey).where(ApiKey.id == key_id, ApiKey.revoked_at.is_(None)).values(revoked_at=time.time())
    )
    if key_id is None or not (await conn.execute(end)).rowcount:
        raise NotFoundError(f"no live key {which!r}: see `skyrl-tinker keys list`")
    return next(row for row in await listed(conn) if row.id == key_id)


async def listed(conn: AsyncConnection) -> list[KeyRow]:
    """Revoked ones, too; oldest first."""
    query = select(ApiKey.id, ApiKey.name, ApiKey.created_at, ApiKey.revoked_at).order_by(ApiKey.id)
    return [
        KeyRow(OwnerId(row.id), row.name, row.created_at, row.revoked_at) for row in await conn.execute(query)
    ]


async def live(conn: AsyncConnection) -> dict[bytes, KeyRow]:
    """By digest."""
    columns = ApiKey.id, ApiKey.name, ApiKey.created_at, ApiKey.hash
    rows = await conn.execute(select(*columns).where(ApiKey.revoked_at.is_(None)))
    return {row.hash: KeyRow(OwnerId(row.id), row.name, row.created_at, None) for row in rows}


async def counts(conn: AsyncConnection) -> tuple[int, int]:
    """How many were ever made, and how many of them are revoked: none is deleted and none comes back, so
    while these are the same all is."""
    row = (await conn.execute(select(func.count(), func.count(ApiKey.revoked_at)).select_from(ApiKey))).one()
    return row[0], row[1]


async def id_of(conn: AsyncConnection, name: str) -> OwnerId:
    """Of the live key of this name. NotFoundError."""
    found = await _live_id(conn, name)
    if found is None:
        raise NotFoundError(f"no live key {name!r}: see `skyrl-tinker keys list`")
    return OwnerId(found)


async def name_of(conn: AsyncConnection, owner: OwnerId | None) -> str:
    """What an owner is called; LOCAL without keys."""
    return await conn.scalar(select(ApiKey.name).where(ApiKey.id == owner)) or LOCAL


async def _live_id(conn: AsyncConnection, name: str) -> int | None:
    return await conn.scalar(select(ApiKey.id).where(ApiKey.name == name, ApiKey.revoked_at.is_(None)))

"""API keys at rest: by their hash alone, each name at most once among the living."""

import sqlite3

import pytest

from skyrl_tinker.errors import NotFoundError, UserError
from skyrl_tinker.store import api_keys, server_state
from skyrl_tinker.store.database import sqlite
from skyrl_tinker.store.store import Store


async def made(store: Store, name: str) -> str:
    return await store.write(lambda conn: api_keys.create(conn, name))


async def live_names(store: Store) -> list[str]:
    with store.read() as conn:
        return [row.name for row in api_keys.live_by_digest(conn).values()]


async def test_the_database_holds_no_key_only_its_sha256(store: Store, url: str) -> None:
    key = await made(store, "alice")
    assert key.startswith("tml-")
    assert len(key) == 4 + 43
    with sqlite3.connect(sqlite.database(url)) as raw:
        dump = "\n".join(raw.iterdump())
    raw.close()
    assert api_keys.digest(key).hex() in dump.lower()
    assert not any(part in dump for part in (key, key[4:], key[-8:], key[4:12]))


async def test_two_keys_are_never_the_same(store: Store) -> None:
    assert len({await made(store, f"k{number}") for number in range(20)}) == 20


@pytest.mark.parametrize("name", ["", "1st", "a/b", "../x", "a b", "a" * 65, "é", "a\n"])
async def test_names_of_another_form_are_refused(store: Store, name: str) -> None:
    with pytest.raises(UserError, match=r"name: found .*, expected a letter"):
        await made(store, name)


async def test_a_name_is_free_again_once_its_key_is_revoked(store: Store) -> None:
    await made(store, "alice@example.com")
    with pytest.raises(UserError, match="which a live key has"):
        await made(store, "alice@example.com")
    await store.write(lambda conn: api_keys.revoke(conn, "alice@example.com"))
    assert await live_names(store) == []
    await made(store, "alice@example.com")
    with store.read() as conn:
        first, second = api_keys.list_keys(conn)
    assert (first.revoked_at is None, second.revoked_at is None) == (False, True)


async def test_revoking_goes_by_name_or_id_and_only_once(store: Store) -> None:
    for name in ("alice", "bob"):
        await made(store, name)
    assert (await store.write(lambda conn: api_keys.revoke(conn, "2"))).name == "bob"
    assert (await store.write(lambda conn: api_keys.revoke(conn, "alice"))).id == 1
    for gone in ("2", "alice", "carol", "3", "9" * 40):
        with pytest.raises(NotFoundError, match=f"no live key '{gone}'"):
            await store.write(lambda conn, gone=gone: api_keys.revoke(conn, gone))  # type: ignore[misc]


async def test_counts_change_with_every_change(store: Store) -> None:
    seen = []
    for change in (None, "create", "revoke"):
        if change == "create":
            await made(store, "alice")
        elif change == "revoke":
            await store.write(lambda conn: api_keys.revoke(conn, "alice"))
        with store.read() as conn:
            seen.append(api_keys.count_keys(conn))
    assert seen == [(0, 0), (1, 0), (1, 1)]


async def test_an_owner_is_called_by_its_key_and_nobody_is_local(store: Store) -> None:
    await made(store, "alice")
    with store.read() as conn:
        owner = api_keys.live_id(conn, "alice")
        assert api_keys.owner_name(conn, owner) == "alice"
        assert api_keys.owner_name(conn, None) == "local"


async def test_a_secret_is_made_once(store: Store) -> None:
    first = await store.write(lambda conn: server_state.get_or_create_secret(conn, "a"))
    assert len(first) == 32
    assert await store.write(lambda conn: server_state.get_or_create_secret(conn, "a")) == first
    assert await store.write(lambda conn: server_state.get_or_create_secret(conn, "b")) != first

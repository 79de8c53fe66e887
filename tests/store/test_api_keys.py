"""API keys at rest: by their hash alone, each name at most once among the living."""

import time
from pathlib import Path

import pytest
from sqlalchemy import text

from skyrl_tinker.api.security.keyring import KeyRing
from skyrl_tinker.domain.ids import ALL_OWNERS, OwnerId, Reach
from skyrl_tinker.errors import NotFoundError, UnauthenticatedError, UserError
from skyrl_tinker.store import api_keys, audit_log, owners
from skyrl_tinker.store.api_keys import Secret
from skyrl_tinker.store.cluster.signing_secrets import SigningSecrets
from skyrl_tinker.store.database.group_commit import Op
from skyrl_tinker.store.database.tables import Base
from skyrl_tinker.store.reports import session_listing
from skyrl_tinker.store.store import Store
from tests.store.support.rows import new_session
from tests.support.reads import reading
from tests.support.skew import skew


async def made(store: Store, name: str) -> str:
    return await store.write(lambda conn: api_keys.create(conn, name))


async def live_names(store: Store) -> list[str]:
    with reading(store) as conn:
        return [row.name for row in api_keys.list_keys(conn) if row.is_live(time.time())]


async def test_the_database_holds_no_key_only_its_sha256(store: Store) -> None:
    key = await made(store, "alice")
    assert key.startswith("tml-")
    assert len(key) == 4 + 43
    with reading(store) as conn:
        tables = [table.fullname for table in Base.metadata.sorted_tables]
        rows = [row for table in tables for row in conn.execute(text(f"SELECT * FROM {table}"))]
    dump = str(rows)
    assert str(api_keys.digest(key)) in dump
    assert not any(part in dump for part in (key, key[4:], key[-8:], key[4:12]))


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    skew(monkeypatch, 3600.0)


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
async def test_keys_live_by_the_clock_of_the_database(ahead: None, store: Store, tmp_path: Path) -> None:
    """One clock for all API processes and the command line, whatever hosts they are on."""
    key = await store.write(lambda conn: api_keys.create(conn, "alice", expires_at=store.now() - 60))
    ring = KeyRing(store, SigningSecrets(tmp_path))
    await ring.refresh()
    with pytest.raises(UnauthenticatedError, match="expired"):
        ring.caller(key)
    with pytest.raises(NotFoundError):
        await store.read(lambda conn: api_keys.find_live(conn, "alice"))


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
    first, second = await store.read(api_keys.list_keys)
    assert (first.revoked_at is None, second.revoked_at is None) == (False, True)


async def test_revoking_goes_by_name_or_id_and_only_once(store: Store) -> None:
    for name in ("alice", "bob"):
        await made(store, name)
    assert (await store.write(lambda conn: api_keys.revoke(conn, "2"))).name == "bob"
    assert (await store.write(lambda conn: api_keys.revoke(conn, "alice"))).id == 1
    for gone in ("2", "alice", "carol", "3", "9" * 40):
        with pytest.raises(NotFoundError, match=f"no live key '{gone}'"):
            await store.write(lambda conn, gone=gone: api_keys.revoke(conn, gone))  # type: ignore[misc]


CHANGES: list[Op[object]] = [
    lambda conn: api_keys.create(conn, "alice"),
    lambda conn: api_keys.create(conn, "bob", expires_at=time.time() + 60, admin=True),
    lambda conn: api_keys.rotate(conn, "alice", 60),
    lambda conn: api_keys.rotate(conn, "alice", 0),
    lambda conn: api_keys.adopt(conn, "bob", api_keys.NO_KEY),
    lambda conn: api_keys.revoke(conn, "alice"),
    lambda conn: api_keys.adopt(conn, "bob", "1"),
]


async def test_every_change_is_counted_and_on_record(store: Store) -> None:
    seen = []
    for change in CHANGES:
        await store.write(change)
        with reading(store) as conn:
            seen.append(api_keys.count_changes(conn))
    assert seen == list(range(1, len(CHANGES) + 1))
    with reading(store) as conn:
        events = audit_log.events_between(conn, ALL_OWNERS, 0, time.time() + 1, None)
        assert api_keys.count_keys(conn) == 2
    names = [(event.event, event.details["key"]) for event in events]
    actions = ("create", "create", "rotate", "rotate", "adopt", "revoke", "adopt")
    holders = ("alice", "bob", "alice", "alice", "bob", "alice", "bob")
    assert names == [(f"key_{action}", holder) for action, holder in zip(actions, holders, strict=True)]


async def test_noting_a_use_is_no_change_and_never_goes_back(store: Store) -> None:
    await made(store, "alice")
    for at in (20.0, 10.0):
        await store.write(lambda conn, at=at: api_keys.note_use(conn, {OwnerId(1): at}))  # type: ignore[misc]
    with reading(store) as conn:
        assert [row.last_used_at for row in api_keys.list_keys(conn)] == [20.0]
        assert api_keys.count_changes(conn) == 1


async def secrets(store: Store) -> dict[bytes, Secret]:
    return await store.read(api_keys.secrets_by_digest)


async def test_rotation_keeps_the_owner_and_for_a_time_one_old_secret(store: Store) -> None:
    first = await made(store, "alice")
    before = time.time()
    second = await store.write(lambda conn: api_keys.rotate(conn, "1", 60))
    found = await secrets(store)
    assert {found[api_keys.digest(each)].key.id for each in (first, second)} == {1}
    old, new = (found[api_keys.digest(each)] for each in (first, second))
    assert (new.until, new.end, old.end) == (None, None, "replaced")
    assert old.until is not None
    assert before + 60 <= old.until <= time.time() + 60
    third = await store.write(lambda conn: api_keys.rotate(conn, "alice", 60))
    assert set(await secrets(store)) == {api_keys.digest(second), api_keys.digest(third)}


async def test_a_secret_ends_at_the_first_of_its_ends(store: Store) -> None:
    soon, later = time.time() + 50, time.time() + 100
    first = await store.write(lambda conn: api_keys.create(conn, "alice", expires_at=later))
    second = await store.write(lambda conn: api_keys.rotate(conn, "alice", 3600, expires_at=soon))
    assert {each.until for each in (await secrets(store)).values()} == {soon}
    await store.write(lambda conn: api_keys.revoke(conn, "alice"))
    found = await secrets(store)
    assert {found[api_keys.digest(each)].end for each in (first, second)} == {"revoked"}


async def test_rotation_keeps_the_expiry_unless_it_is_given_one(store: Store) -> None:
    await store.write(lambda conn: api_keys.create(conn, "alice", expires_at=2e9))
    for given, expected in ((None, 2e9), (3e9, 3e9)):
        await store.write(lambda conn, given=given: api_keys.rotate(conn, "alice", 0, expires_at=given))  # type: ignore[misc]
        with reading(store) as conn:
            assert api_keys.find_live(conn, "alice").expires_at == expected


async def test_an_expired_key_is_dead_and_its_name_is_free(store: Store) -> None:
    await store.write(lambda conn: api_keys.create(conn, "alice", expires_at=time.time() - 1))
    for change in (lambda conn: api_keys.rotate(conn, "1", 0), lambda conn: api_keys.revoke(conn, "alice")):
        with pytest.raises(NotFoundError, match="no live key"):
            await store.write(change)
    await made(store, "alice")
    assert await live_names(store) == ["alice"]


async def test_a_live_key_adopts_what_a_dead_one_made_and_nothing_else(store: Store) -> None:
    for name in ("alice", "bob", "carol"):
        await made(store, name)
    for owner in (1, 1, 2, None):
        await new_session(store, owner and OwnerId(owner))
    with pytest.raises(UserError, match=r"key 1 \(alice\) is live: revoke it"):
        await store.write(lambda conn: api_keys.adopt(conn, "carol", "1"))
    with pytest.raises(UserError, match=r"key 1 \(alice\) is live: revoke it"):
        await store.write(lambda conn: api_keys.adopt(conn, "carol", "alice"))
    with pytest.raises(NotFoundError, match="no key 'dave'"):
        await store.write(lambda conn: api_keys.adopt(conn, "carol", "dave"))
    await store.write(lambda conn: api_keys.revoke(conn, "alice"))
    with pytest.raises(NotFoundError, match="no live key 'alice'"):
        await store.write(lambda conn: api_keys.adopt(conn, "alice", "1"))
    assert await store.write(lambda conn: api_keys.adopt(conn, "carol", "1")) == 2
    with reading(store) as conn:
        sessions = [len(session_listing.list_ids(conn, reach, 9, 0)) for reach in OWNERS]
    assert sessions == [0, 1, 2, 1, 4]
    assert await store.write(lambda conn: api_keys.adopt(conn, "carol", api_keys.NO_KEY)) == 1
    await store.write(lambda conn: api_keys.revoke(conn, "carol"))
    assert await store.write(lambda conn: api_keys.adopt(conn, "bob", "carol")) == 3
    await made(store, "carol")
    await store.write(lambda conn: api_keys.revoke(conn, "carol"))
    with pytest.raises(UserError, match="keys 3, 4 were called 'carol': give the id"):
        await store.write(lambda conn: api_keys.adopt(conn, "bob", "carol"))


OWNERS: tuple[Reach, ...] = (OwnerId(1), OwnerId(2), OwnerId(3), None, ALL_OWNERS)


async def test_an_owner_is_called_by_its_key_and_nobody_is_local(store: Store) -> None:
    await made(store, "alice")
    with reading(store) as conn:
        owner = api_keys.find_live(conn, "alice").id
        assert owners.name_of(conn, owner) == "alice"
        assert owners.name_of(conn, None) == "local"

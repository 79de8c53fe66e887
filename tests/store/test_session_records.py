"""Sessions live while they heartbeat; what they held is let go afterwards."""

import sqlite3
import time
from functools import partial

import pytest
from sqlalchemy import Connection, insert, select, update

from skyrl_tinker.domain.ids import ModelState, OwnerId, SamplingSessionId, SessionId, VersionId
from skyrl_tinker.domain.values import WeightVersion
from skyrl_tinker.errors import GoneError, NotFoundError
from skyrl_tinker.store import model_records, sampling_sessions, session_records, weight_versions
from skyrl_tinker.store.database import sqlite
from skyrl_tinker.store.database.tables import AdapterVersion, Model, Session
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.session_records import Beat
from skyrl_tinker.store.store import Store
from tests.store.support.databases import on_postgresql
from tests.store.support.rows import (
    base_sampler,
    create,
    ephemeral,
    finish_session,
    new_session,
    sample,
    step,
)
from tests.support.reads import reading

NOBODY = SessionId("nobody")
PARKED_S = 86400.0


async def expired(store: Store, after_s: float, timeout_s: float = 600) -> list[SessionId]:
    with reading(store) as conn:
        return session_records.list_expired(conn, time.time() + after_s, timeout_s, PARKED_S)


async def beat(store: Store, *beats: Beat) -> dict[Beat, Exception]:
    return {**await store.write(lambda conn: session_records.heartbeat(conn, beats))}


async def droppable(store: Store) -> list[WeightVersion]:
    with reading(store) as conn:
        if conn.dialect.name == "sqlite":  # its default, which some builds raise
            sqlite.raw(conn).setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 32_766)
        usage = weight_versions.ephemeral_usage(conn)
        return weight_versions.list_droppable_versions(conn, usage)


async def sampler_on(store: Store, session: SessionId, version: VersionId) -> SamplingSessionId:
    return await store.write(
        lambda conn: sampling_sessions.create(
            conn, session, 0, base_model="tiny", model_path=None, version_id=version
        )
    )


@on_postgresql
@pytest.mark.parametrize("behind_s", [900.0, -900.0])
async def test_heartbeats_count_by_the_clock_of_the_database_s_host(
    store: Store, session: SessionId, behind_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those that a host with a wrong clock receives, of which the engine's is another."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - behind_s)
    await store.write(lambda conn: session_records.heartbeat(conn, [(None, session)]))
    assert abs(store.now() - real()) < 300
    monkeypatch.undo()
    for after_s, over in ((300.0, []), (900.0, [session])):
        assert await expired(store, after_s) == over


async def test_a_finished_session_is_gone_and_an_unknown_one_not_found(
    store: Store, session: SessionId
) -> None:
    assert await beat(store, (None, session)) == {}
    await finish_session(store, session)
    failed = await beat(store, (None, session), (None, NOBODY))
    assert type(failed[None, NOBODY]) is NotFoundError
    with pytest.raises(GoneError, match="is finished \\(done\\)"):
        raise failed[None, session]
    with pytest.raises(NotFoundError):
        await store.write(lambda conn: session_records.finish(conn, NOBODY, "done", None))


async def test_the_first_reason_of_finishing_stands(store: Store, session: SessionId) -> None:
    await finish_session(store, session)
    await store.write(lambda conn: session_records.finish(conn, session, "expired", "late"))
    with pytest.raises(GoneError, match="\\(done\\)"), reading(store) as conn:
        session_records.require_live(conn, session)


async def test_a_silent_session_expires_until_its_models_are_released(
    store: Store, session: SessionId, model: ModelRow
) -> None:
    assert await expired(store, after_s=599) == []
    assert await expired(store, after_s=601) == [session]
    await store.write(lambda conn: session_records.finish(conn, session, "expired", None))
    assert await expired(store, after_s=601) == [session]
    for gone in (ModelState.RELEASED, ModelState.FAILED, ModelState.LOST):
        await store.write(lambda conn, state=gone: model_records.set_state(conn, model.key, state))
        assert await expired(store, after_s=601) == []


async def test_the_session_of_a_parked_model_may_be_silent_for_longer(
    store: Store, session: SessionId, model: ModelRow
) -> None:
    await store.write(lambda conn: model_records.set_state(conn, model.key, ModelState.PARKED))
    assert await expired(store, after_s=PARKED_S - 1) == []
    assert await expired(store, after_s=PARKED_S + 1) == [session]
    other = await create(store, session, 1)
    assert await expired(store, after_s=601) == [session], "one that is not parked takes a place"
    await store.write(lambda conn: model_records.set_state(conn, other.key, ModelState.RELEASED))
    assert await expired(store, after_s=601) == []
    await finish_session(store, session)
    assert await expired(store, after_s=0) == [session]


async def test_a_silent_session_that_only_samples_expires_once(store: Store, session: SessionId) -> None:
    assert await expired(store, after_s=599) == []
    assert await expired(store, after_s=601) == [session]
    await store.write(lambda conn: session_records.finish(conn, session, "expired", None))
    assert await expired(store, after_s=601) == []


async def test_heartbeats_keep_the_sessions_of_their_owners_and_no_others(
    store: Store, session: SessionId
) -> None:
    """Many in one statement, some of which are not live."""
    others = [await new_session(store) for _ in range(session_records.AT_ONCE)]
    await finish_session(store, others[0])
    await store.write(lambda conn: conn.execute(update(Session).values(last_heartbeat_at=0.0)))
    stranger = OwnerId(7), session
    failed = await beat(store, stranger, *((None, each) for each in others))
    assert {each: type(error) for each, error in failed.items()} == {
        stranger: NotFoundError,
        (None, others[0]): GoneError,
    }
    assert set(await expired(store, after_s=0)) == {session}


async def test_of_many_silent_sessions_some_end_at_once_those_silent_for_longest_first(store: Store) -> None:
    def create_many(conn: Connection) -> list[SessionId]:
        return [
            session_records.create(conn, owner=None, sdk_version="0.38.0")
            for _ in range(session_records.AT_ONCE + 2)
        ]

    sessions = await store.write(create_many)
    for session, last in ((sessions[0], 2.0), (sessions[1], 1.0)):
        beaten = update(Session).where(Session.session_id == session).values(last_heartbeat_at=last)
        await store.write(lambda conn, beaten=beaten: conn.execute(beaten))  # type: ignore[misc]
    others = Session.session_id.in_(sessions[2:])
    await store.write(lambda conn: conn.execute(update(Session).where(others).values(last_heartbeat_at=0.0)))
    silent = await expired(store, after_s=0)
    assert sorted(silent) == sorted(sessions[2:])
    await store.write(lambda conn: [session_records.finish(conn, each, "expired", None) for each in silent])
    assert await expired(store, after_s=0) == [sessions[1], sessions[0]]


async def test_a_heartbeat_keeps_a_session(store: Store, session: SessionId, model: ModelRow) -> None:
    asked = time.time() + 600
    await beat(store, (None, session))
    with reading(store) as conn:
        assert session_records.list_expired(conn, asked, 600, PARKED_S) == []


async def test_work_keeps_a_session_that_sends_no_heartbeats(
    store: Store, session: SessionId, model: ModelRow, sampler: SamplingSessionId
) -> None:
    """As a REST client may do, which knows of none."""
    other = await new_session(store)
    await base_sampler(store, other)
    for submit in (partial(step, store, model, 1), partial(sample, store, sampler, 0)):
        asked = time.time() + 600
        await submit()
        with reading(store) as conn:
            assert session_records.list_expired(conn, asked, 600, PARKED_S) == [other]
        assert set(await expired(store, after_s=601)) == {session, other}


async def test_a_finished_session_expires_at_once(store: Store, session: SessionId, model: ModelRow) -> None:
    other = await new_session(store)
    await create(store, other)
    await finish_session(store, session)
    assert await expired(store, after_s=0) == [session]


async def test_a_version_is_known_from_publishing_to_dropping(store: Store, model: ModelRow) -> None:
    async def get(version_id: VersionId) -> WeightVersion | None:
        with reading(store) as conn:
            return weight_versions.published_version(conn, version_id)

    version = await store.write(
        lambda conn: weight_versions.insert_version(conn, model.key, "full", durable=True)
    )
    assert await get(version) is None
    await store.write(lambda conn: weight_versions.publish_version(conn, version, "/d", 1))
    assert await get(version) == WeightVersion(version, "full", "/d")
    await store.write(lambda conn: weight_versions.mark_dropped(conn, version))
    assert await get(version) is None


async def test_version_ids_are_never_used_again(store: Store, model: ModelRow) -> None:
    ids = [await ephemeral(store, model.key) for _ in range(3)]
    for version in ids:
        await store.write(lambda conn, version=version: weight_versions.mark_dropped(conn, version))  # type: ignore[misc]
    assert await ephemeral(store, model.key) > max(ids)


async def test_an_ephemeral_version_goes_when_the_last_session_on_it_is_finished(
    store: Store, session: SessionId, model: ModelRow
) -> None:
    version = await ephemeral(store, model.key, "/ram/v1")
    assert await droppable(store) == [], "its sampling session may be in the making"
    other = await new_session(store)
    await sampler_on(store, session, version)
    await sampler_on(store, other, version)
    await finish_session(store, session)
    assert await droppable(store) == [], "another session samples from it"
    await finish_session(store, other)
    assert await droppable(store) == [WeightVersion(version, "lora", "/ram/v1")]
    await store.write(lambda conn: weight_versions.mark_dropped(conn, version))
    assert await droppable(store) == []


async def inflight(store: Store, model: ModelRow, directory: str) -> VersionId:
    def op(conn: Connection) -> VersionId:
        version = weight_versions.insert_version(conn, model.key, "lora", durable=False, inflight=True)
        weight_versions.publish_version(conn, version, directory, 1)
        return version

    return await store.write(op)


async def test_an_inflight_session_follows_the_newest_published_version_of_its_model(
    store: Store, session: SessionId, model: ModelRow
) -> None:
    async def target() -> WeightVersion | None:
        with reading(store) as conn:
            row = sampling_sessions.get(conn, sampler)
            assert row is not None
            assert row.follows == model.key
            return weight_versions.newest_inflight(conn, row.follows)

    sampler = await sampler_on(store, session, await inflight(store, model, "/ram/v1"))
    second = await inflight(store, model, "/ram/v2")
    await ephemeral(store, model.key, "/ram/v3")  # a snapshot is nobody's target
    await store.write(
        lambda conn: weight_versions.insert_version(conn, model.key, "lora", durable=False, inflight=True)
    )
    assert await target() == WeightVersion(second, "lora", "/ram/v2")


async def test_a_superseded_inflight_version_goes_at_once_and_the_newest_with_its_last_session(
    store: Store, session: SessionId, model: ModelRow
) -> None:
    other = await new_session(store)
    first = await inflight(store, model, "/ram/v1")
    await sampler_on(store, session, first)
    await sampler_on(store, other, first)
    assert await droppable(store) == []
    second = await inflight(store, model, "/ram/v2")
    assert await droppable(store) == [WeightVersion(first, "lora", "/ram/v1")]
    await store.write(lambda conn: weight_versions.mark_dropped(conn, first))
    await finish_session(store, session)
    assert await droppable(store) == [], "a session that was made on the first one follows"
    await finish_session(store, other)
    assert await droppable(store) == [WeightVersion(second, "lora", "/ram/v2")]


async def test_of_each_model_all_but_the_newest_versions_are_surplus(
    store: Store, session: SessionId, model: ModelRow
) -> None:
    other = await create(store, session, 1)
    first, second = [await ephemeral(store, model.key) for _ in range(2)]
    await inflight(store, model, "/ram/v3")
    for key in (other.key, other.key, model.key, model.key):
        await ephemeral(store, key)

    def surplus(keep: int, before: float | None = None) -> list[VersionId]:
        with reading(store) as conn:
            usage = weight_versions.ephemeral_usage(conn)
            return [each.id for each in weight_versions.list_surplus_versions(conn, usage, keep, before)]

    assert [surplus(keep) for keep in (2, 3, 4)] == [[first, second], [first], []]
    assert surplus(2, before=0.0) == []


async def test_surplus_versions_of_models_that_are_asked_for_apart_are_in_one_order(
    store: Store, session: SessionId, model: ModelRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_versions, "MODELS_AT_ONCE", 1)
    other = await create(store, session, 1)
    keys = model.key, other.key, model.key, other.key, model.key
    versions = [await ephemeral(store, key) for key in keys]
    with reading(store) as conn:
        usage = weight_versions.ephemeral_usage(conn)
        surplus = weight_versions.list_surplus_versions(conn, usage, 1)
    assert [each.id for each in surplus] == versions[:3]


async def test_more_models_may_have_versions_to_drop_than_a_statement_has_values(
    store: Store, session: SessionId
) -> None:
    """SQLite takes 32,766 values, PostgreSQL 65,535."""
    await store.write(partial(_keep_inflight, session=session, models=22_000, versions=2))
    superseded = await droppable(store)
    assert len(superseded) == 22_000
    await finish_session(store, session)
    assert len(await droppable(store)) == 44_000


def _keep_inflight(conn: Connection, session: SessionId, models: int, versions: int) -> None:
    """Insert models of a session, each with so many unnamed weights that are inflight."""
    lora = {"lora_rank": 8, "seed": 1, "train_mlp": True, "train_attn": True, "train_unembed": True}
    model = {"session_id": session, "base_model": "tiny", "optimizer_config": {}, "user_metadata": {}} | lora
    made = model | {"state": ModelState.READY, "created_at": 0.0, "last_request_at": 0.0}
    numbered = [{"model_id": f"{session}:{number}", "model_seq_id": number} for number in range(models)]
    conn.execute(insert(Model), [made | each for each in numbered])
    version = {"kind": "lora", "durable": False, "inflight": True, "directory": "/nowhere", "created_at": 0.0}
    keys = conn.scalars(select(Model.key)).all()
    conn.execute(
        insert(AdapterVersion), [version | {"model_key": key} for key in keys for _ in range(versions)]
    )


async def test_a_durable_version_is_never_droppable(
    store: Store, session: SessionId, model: ModelRow
) -> None:
    version = await store.write(
        lambda conn: weight_versions.insert_version(conn, model.key, "lora", durable=True)
    )
    await store.write(lambda conn: weight_versions.publish_version(conn, version, "/d", 1))
    await finish_session(store, session)
    assert await droppable(store) == []


async def test_a_sampling_session_is_read_as_written(
    store: Store, session: SessionId, model: ModelRow
) -> None:
    version = await ephemeral(store, model.key)
    sampler = await sampler_on(store, session, version)
    with reading(store) as conn:
        row = sampling_sessions.get(conn, sampler)
        assert row == sampling_sessions.SamplingSessionRow(sampler, session, 0, "tiny", None, version)
        assert sampling_sessions.get(conn, SamplingSessionId("nobody")) is None

"""Old rows go, in slices, and nothing that is still needed goes with them."""

import time
from collections.abc import Callable

import pytest
from sqlalchemy import Connection, func, select, text, update

from skyrl_tinker.domain.ids import (
    CheckpointKind,
    FutureStatus,
    ModelState,
    OwnerId,
    SamplingSessionId,
    SessionId,
    VersionId,
)
from skyrl_tinker.domain.values import LoraSpec, Usage
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.schemas.console import StepMeasures
from skyrl_tinker.store import (
    api_keys,
    checkpoint_records,
    model_records,
    sampling_sessions,
    session_records,
    usage_records,
    weight_versions,
)
from skyrl_tinker.store.checkpoint_records import NewCheckpoint
from skyrl_tinker.store.console import run_reports, step_points
from skyrl_tinker.store.database.tables import Base, Future, Model, Request, SavedCheckpoint, Session
from skyrl_tinker.store.futures import finish
from skyrl_tinker.store.futures.record import Accepted
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.retention import key_purges, row_purges, session_purges, slices
from skyrl_tinker.store.store import Store
from tests.store.support.databases import on_sqlite
from tests.store.support.rows import (
    base_sampler,
    create,
    ephemeral,
    finish_session,
    new_session,
    outcome,
    sample,
    step,
)
from tests.support.reads import reading

POINT = StepMeasures(**dict.fromkeys(step_points.NAMES, 1.0))
KEPT = {"server_state", "alembic_version"}


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE", 2)


async def run_all(store: Store, take: Callable[[Connection], bool]) -> int:
    """Take slices until there are no more; returns how many."""
    slices = 1
    while await store.write(take):
        slices += 1
    return slices


async def done(store: Store, accepted: Accepted) -> None:
    future_id = (await outcome(store, accepted.request_id)).future_id
    await store.write(lambda conn: finish.succeed(conn, future_id, "t", b"r", Usage(1, 0, 1)))


async def requests(store: Store) -> list[str]:
    return await store.read(lambda conn: list(conn.scalars(select(Future.request_id).order_by(Future.id))))


async def rows(store: Store) -> dict[str, int]:
    """How many rows each table has, empty ones left out."""
    with reading(store) as conn:
        counts = {
            name: conn.scalar(select(func.count()).select_from(table)) or 0
            for name, table in Base.metadata.tables.items()
        }
    return {name: count for name, count in counts.items() if count and name not in KEPT}


async def purge_samples(store: Store, before: float) -> int:
    await store.write(usage_records.roll_up)
    await run_all(store, lambda conn: row_purges.purge_results(conn, before))
    return await run_all(store, lambda conn: row_purges.purge_samples(conn, before))


async def test_samples_go_in_slices_with_their_results(store: Store, sampler: SamplingSessionId) -> None:
    accepted = [await sample(store, sampler, number) for number in range(7)]
    for each in accepted:
        await done(store, each)
    assert await purge_samples(store, time.time() + 1) == 4
    assert await requests(store) == []


async def bodies(store: Store) -> int:
    return await store.read(lambda conn: conn.scalar(select(func.count()).select_from(Request)) or 0)


async def test_prompts_of_samples_stay_as_long_as_a_list_shows_them_and_their_results(
    store: Store, sampler: SamplingSessionId, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_purges, "MOST", 3)
    accepted = [await sample(store, sampler, number) for number in range(6)]
    before = await bodies(store)  # also that of the model
    ids = [(await outcome(store, each.request_id)).future_id for each in accepted[1:]]
    ended = dict.fromkeys(ids, finish.FutureResult("t", b"r", usage=Usage(1, 0, 1)))
    await store.write(lambda conn: finish.finish_all(conn, ended, ids))
    await run_all(store, row_purges.purge_prompts)
    assert await bodies(store) == before - 2, "the first is pending, three are new"
    await purge_samples(store, time.time() + 1)
    assert await bodies(store) == before - 5


async def test_what_is_pending_or_newer_stays_and_holds_up_nothing_for_ever(
    store: Store, sampler: SamplingSessionId, model: ModelRow
) -> None:
    """The pending one is where the sweep goes on. Requests of a model in training stay."""
    trained = await step(store, model, 1)
    accepted = [await sample(store, sampler, number) for number in range(4)]
    for each in (trained, accepted[0], accepted[2]):
        await done(store, each)
    between = time.time()
    await done(store, accepted[3])
    await purge_samples(store, between)
    left = await requests(store)
    assert accepted[0].request_id not in left
    assert [each.request_id for each in (trained, *accepted[1:])] == left[-4:]
    await done(store, accepted[1])
    await purge_samples(store, time.time() + 1)
    assert (await requests(store))[-1] == trained.request_id


async def test_a_result_that_is_not_counted_yet_stays(store: Store, sampler: SamplingSessionId) -> None:
    accepted = await sample(store, sampler, 0)
    await done(store, accepted)
    later = time.time() + 1
    await run_all(store, lambda conn: row_purges.purge_results(conn, later))
    await run_all(store, lambda conn: row_purges.purge_samples(conn, later))
    assert (await outcome(store, accepted.request_id)).body == b"r"


@on_sqlite
async def test_a_file_that_is_half_empty_shrinks_and_one_that_is_fuller_does_not(store: Store) -> None:
    def pages(conn: Connection) -> int:
        return int(conn.exec_driver_sql("PRAGMA page_count").scalar_one())

    def fill(conn: Connection) -> None:
        conn.exec_driver_sql("CREATE TABLE bodies (id INTEGER PRIMARY KEY, body BLOB)")
        for _ in range(100):
            conn.exec_driver_sql("INSERT INTO bodies (body) VALUES (zeroblob(65536))")

    async def after(deleted: str) -> int:
        await store.write(lambda conn: conn.execute(text(f"DELETE FROM bodies WHERE id {deleted}")))
        await run_all(store, slices.shrink)
        return await store.read(pages)

    await store.write(fill)
    full = await store.read(pages)
    assert await after("% 3 = 0") == full, "others will use those pages"
    assert await after("< 80") < full / 2
    count = "SELECT count(*) FROM bodies WHERE length(body) = 65536"
    assert await store.read(lambda conn: conn.exec_driver_sql(count).scalar_one()) == 14


async def lived(store: Store, name: str = "") -> SessionId:
    """A session that trained, saved, sampled, and is finished."""
    session = await new_session(store)
    model = await create(store, session)
    for seq_id in range(1, 4):
        await done(store, await step(store, model, seq_id))
        await store.write(
            lambda conn, seq_id=seq_id: step_points.add(conn, model.key, seq_id, time.time(), POINT)
        )
        await store.write(lambda conn: run_reports.add(conn, model.key, 1, {"reward": 1.0}))
    version = await ephemeral(store, model.key)
    sampler = await store.write(
        lambda conn: sampling_sessions.create(
            conn, session, 1, base_model="tiny", model_path=None, version_id=version
        )
    )
    await done(store, await sample(store, sampler, 0))
    if name:
        new = NewCheckpoint(model.key, CheckpointKind.WEIGHTS, name, "/nowhere", "tiny", LoraSpec(8, 1), 1)
        await store.write(lambda conn: checkpoint_records.add(conn, new, replace=False))
    await finish_session(store, session)
    await store.write(lambda conn: weight_versions.mark_dropped(conn, version))
    await store.write(lambda conn: model_records.set_state(conn, model.key, ModelState.RELEASED, None))
    with reading(store) as conn:  # its creation
        pending = list(conn.scalars(select(Future.id).where(Future.status == FutureStatus.PENDING)))
    for future_id in pending:
        await store.write(lambda conn, future_id=future_id: finish.succeed(conn, future_id, "t", b""))
    await store.write(usage_records.roll_up)
    return session


async def purge_versions(store: Store, before: float) -> int:
    return await run_all(store, lambda conn: row_purges.purge_versions(conn, before))


async def clear(store: Store, before: float) -> list[SessionId]:
    sessions = await store.read(lambda conn: session_purges.ended_sessions(conn, before))
    for session in sessions:
        await run_all(store, lambda conn, session=session: session_purges.clear_session(conn, session))
    return sessions


async def forget(store: Store, before: float) -> list[SessionId]:
    sessions = await store.read(lambda conn: session_purges.forgettable_sessions(conn, before))
    for session in sessions:
        await run_all(store, lambda conn, session=session: session_purges.forget_session(conn, session))
    return sessions


async def test_an_ended_session_leaves_nothing(store: Store) -> None:
    session = await lived(store)
    assert await forget(store, time.time() + 1) == [], "it is cleared first"
    assert await clear(store, time.time() - 60) == []
    assert await clear(store, time.time() + 1) == [session]
    assert await clear(store, time.time() + 1) == []
    await purge_versions(store, time.time() + 1)
    history = {"usage_records", "audit_events", "step_points", "run_reports"}
    assert set(await rows(store)) == {"sessions", "models", *history}
    assert await forget(store, time.time() + 1) == [session]
    assert await rows(store) == {}


async def test_a_session_stays_as_long_as_one_of_its_checkpoints(store: Store) -> None:
    session = await lived(store, "a")
    await clear(store, time.time() + 1)
    assert await forget(store, time.time() + 1) == []
    checkpoint = await store.read(lambda conn: conn.scalars(select(SavedCheckpoint.id)).one())
    await store.write(lambda conn: checkpoint_records.mark_removed(conn, checkpoint))
    await run_all(store, lambda conn: row_purges.purge_removed_checkpoints(conn, time.time() - 60))
    assert await forget(store, time.time() + 1) == [], "it is billed for past storage"
    await run_all(store, lambda conn: row_purges.purge_removed_checkpoints(conn, time.time() + 1))
    assert await forget(store, time.time() + 1) == [session]
    assert await rows(store) == {}


async def test_weights_that_another_session_samples_keep_their_session(store: Store) -> None:
    session = await lived(store)
    other = await new_session(store)
    (model,) = await store.read(lambda conn: model_records.list_for_session(conn, session))
    version = await ephemeral(store, model.key)
    borrowed = await store.write(
        lambda conn: sampling_sessions.create(
            conn, other, 0, base_model="tiny", model_path=None, version_id=version
        )
    )
    await clear(store, time.time() + 1)
    assert await forget(store, time.time() + 1) == []
    await done(store, await sample(store, borrowed, 0))


async def test_live_sessions_lose_nothing(store: Store) -> None:
    session = await new_session(store)
    sampler = await base_sampler(store, session)
    await done(store, await sample(store, sampler, 0))
    before = await rows(store)
    assert await clear(store, time.time() + 1) == []
    assert await forget(store, time.time() + 1) == []
    assert await rows(store) == before
    await store.write(lambda conn: session_records.heartbeat(conn, [(None, session)]))


async def sampler_of(store: Store, session: SessionId, version: VersionId) -> SamplingSessionId:
    return await store.write(
        lambda conn: sampling_sessions.create(
            conn, session, version, base_model="tiny", model_path=None, version_id=version
        )
    )


async def test_weights_dropped_long_ago_go_with_their_samplers_while_their_session_lives(
    store: Store, model: ModelRow
) -> None:
    versions = [await ephemeral(store, model.key) for _ in range(5)]
    samplers = [await sampler_of(store, model.session_id, version) for version in versions]
    for version in versions[:4]:
        await store.write(lambda conn, version=version: weight_versions.mark_dropped(conn, version))
    await sample(store, samplers[3], 0)
    assert await purge_versions(store, time.time() - 60) == 1
    assert await purge_versions(store, time.time() + 1) == 2
    with reading(store) as conn:
        kept = [each for each in samplers if sampling_sessions.get(conn, each) is not None]
        assert kept == samplers[3:], "one has a sample, one was not dropped"
        assert weight_versions.published_version(conn, versions[4])
    assert (await rows(store))["adapter_versions"] == 2


async def test_a_sampler_that_follows_newer_weights_keeps_those_it_was_made_on(
    store: Store, model: ModelRow
) -> None:
    first, second, third = [await ephemeral(store, model.key, inflight=True) for _ in range(3)]
    sampler = await sampler_of(store, model.session_id, first)
    for version in (first, second):
        await store.write(lambda conn, version=version: weight_versions.mark_dropped(conn, version))
    await purge_versions(store, time.time() + 1)
    with reading(store) as conn:
        row = sampling_sessions.get(conn, sampler)
        assert row is not None
        assert row.follows == model.key
        newest = weight_versions.newest_inflight(conn, model.key)
        assert newest is not None
        assert newest.id == third
    assert (await rows(store))["adapter_versions"] == 2


async def test_old_points_of_curves_go_and_the_count_of_steps_goes_on(store: Store, model: ModelRow) -> None:
    for at in (10.0, 20.0, 30.0):
        await store.write(lambda conn, at=at: step_points.add(conn, model.key, 1, at, POINT))
    await run_all(store, lambda conn: row_purges.purge_points(conn, 25.0))
    await store.write(lambda conn: step_points.add(conn, model.key, 2, 40.0, POINT))
    with reading(store) as conn:
        assert [point.step for point in step_points.points_after(conn, model.key, 0, 10)] == [3, 4]


async def test_old_reports_of_scripts_go(store: Store, model: ModelRow) -> None:
    for reward in (1.0, 2.0):
        await store.write(lambda conn, reward=reward: run_reports.add(conn, model.key, 1, {"reward": reward}))
    await run_all(store, lambda conn: row_purges.purge_points(conn, time.time() - 60))
    with reading(store) as conn:
        assert len(run_reports.reports_after(conn, model.key, 0, 10).reports) == 2
    await run_all(store, lambda conn: row_purges.purge_points(conn, time.time() + 60))
    with reading(store) as conn:
        assert run_reports.reports_after(conn, model.key, 0, 10).reports == []


async def test_old_audit_events_and_usage_go(store: Store) -> None:
    await lived(store)
    await run_all(store, lambda conn: row_purges.purge_audit(conn, time.time() - 60))
    await run_all(store, lambda conn: row_purges.purge_usage(conn, time.time() - 3600))
    assert {"audit_events", "usage_records"} <= set(await rows(store))
    await run_all(store, lambda conn: row_purges.purge_audit(conn, time.time() + 1))
    await run_all(store, lambda conn: row_purges.purge_usage(conn, time.time() + 3600))
    assert not {"audit_events", "usage_records"} & set(await rows(store))


async def test_what_a_key_left_goes_at_the_administrators_word(store: Store) -> None:
    for name in ("alice", "bob"):
        await store.write(lambda conn, name=name: api_keys.create(conn, name))  # type: ignore[misc]
    left, kept = await lived(store, "a"), await lived(store, "b")
    trained = await new_session(store)
    model = await create(store, trained)
    for session, owner in ((left, 1), (trained, 1), (kept, 2)):
        named = {"owner_id": OwnerId(owner), "display_name": "n", "project_id": "p"}
        move = update(Session).where(Session.session_id == session).values(named)
        await store.write(lambda conn, move=move: conn.execute(move))  # type: ignore[misc]
    await store.write(lambda conn: model_records.set_state(conn, model.key, ModelState.READY))
    with pytest.raises(UserError, match="alice\\) is live: revoke it first"):
        await store.write(lambda conn: key_purges.purge_key(conn, "alice"))
    await store.write(lambda conn: api_keys.revoke(conn, "alice"))
    assert await store.write(lambda conn: key_purges.purge_key(conn, "alice")) == (2, 1)
    with reading(store) as conn:
        described = {row.session_id: row for row in conn.execute(select(Session.__table__))}
        models = conn.execute(select(Model.session_id, Model.user_metadata))
        of_models = {row.session_id: row.user_metadata for row in models}
        saved = select(Model.session_id).join(SavedCheckpoint, SavedCheckpoint.model_key == Model.key)
        live = conn.scalars(saved.where(*checkpoint_records.is_live(conn))).all()
        forgotten = session_purges.ended_sessions(conn, 1.0)
    assert [described[each].user_metadata for each in (left, trained)] == [{}, {}]
    assert {described[each].display_name or described[each].project_id for each in (left, trained)} == {None}
    assert [of_models[each] for each in (left, trained)] == [{}, {}]
    assert described[kept].user_metadata
    assert of_models[kept]
    assert live == [kept]
    assert forgotten == [left]
    assert described[trained].finish_reason == "purged"

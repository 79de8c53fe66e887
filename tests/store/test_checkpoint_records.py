"""Checkpoints: one of a name at a time, gone for clients at once and from disk when nobody holds them."""

import time
from dataclasses import replace

import pytest
from sqlalchemy import Connection

from skyrl_tinker.domain.ids import CheckpointKind, SessionId
from skyrl_tinker.errors import NotFoundError, UserError
from skyrl_tinker.store import checkpoint_records, sampling_sessions, weight_versions
from skyrl_tinker.store.checkpoint_records import CheckpointRow, NewCheckpoint
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.reports import training_runs
from skyrl_tinker.store.store import Store
from tests.store.support.rows import finish_session
from tests.support.reads import reading

WEIGHTS, SAMPLER = CheckpointKind.WEIGHTS, CheckpointKind.SAMPLER_WEIGHTS


def new(model: ModelRow, name: str = "a", directory: str = "/c/1") -> NewCheckpoint:
    return NewCheckpoint(model.key, WEIGHTS, name, directory, "tiny", model.spec, size_bytes=2**40)


async def add(store: Store, checkpoint: NewCheckpoint, *, replace: bool = False) -> int:
    return await store.write(lambda conn: checkpoint_records.add(conn, checkpoint, replace=replace))


async def find(store: Store, model: ModelRow, name: str = "a") -> CheckpointRow | None:
    return await store.read(lambda conn: checkpoint_records.find(conn, None, model.model_id, WEIGHTS, name))


async def delete(store: Store, model: ModelRow, name: str = "a") -> None:
    def op(conn: Connection) -> None:
        checkpoint_records.delete(
            conn, checkpoint_records.require_within(conn, None, model.model_id, WEIGHTS, name)
        )

    await store.write(op)


async def garbage(store: Store) -> list[str]:
    with reading(store) as conn:
        return [row.directory for row in checkpoint_records.list_garbage(conn, time.time())]


async def test_a_checkpoint_is_read_as_written(store: Store, model: ModelRow) -> None:
    full = replace(new(model), has_optimizer=True, optimizer_config={"beta1": 0.9}, user_metadata={"k": None})
    number = await add(store, full)
    row = await find(store, model)
    assert row is not None
    assert (row.id, row.model_id, row.spec, row.size_bytes) == (number, model.model_id, model.spec, 2**40)
    assert (row.has_optimizer, row.optimizer_config, row.user_metadata) == (True, {"beta1": 0.9}, {"k": None})
    assert (row.kind, row.directory, row.version_id, row.expires_at) == (WEIGHTS, "/c/1", None, None)


async def test_a_name_is_kept_unless_it_may_be_replaced(store: Store, model: ModelRow) -> None:
    await add(store, new(model))
    with pytest.raises(UserError, match="weights/a of this model exists and overwrite is false"):
        await add(store, new(model, directory="/c/2"))
    await add(store, new(model, directory="/c/2"), replace=True)
    row = await find(store, model)
    assert row is not None
    assert row.directory == "/c/2"
    assert await garbage(store) == ["/c/1"]


async def test_the_two_kinds_have_names_of_their_own(store: Store, model: ModelRow) -> None:
    await add(store, new(model))
    await add(store, replace(new(model, directory="/c/2"), kind=SAMPLER))
    with reading(store) as conn:
        ids = training_runs.list_checkpoints(conn, None, model.model_id, [WEIGHTS, SAMPLER])
        rows = training_runs.checkpoints_of(conn, ids)
        last = checkpoint_records.latest_for_model(conn, model.key, SAMPLER)
    assert [row.kind for row in rows] == [WEIGHTS, SAMPLER]
    assert last == rows[1]


async def test_a_deleted_checkpoint_is_not_found_and_its_name_is_free(store: Store, model: ModelRow) -> None:
    number = await add(store, new(model))
    await delete(store, model)
    assert await find(store, model) is None
    with pytest.raises(NotFoundError, match=f"no checkpoint tinker://{model.model_id}/weights/a"):
        await delete(store, model)
    await add(store, new(model, directory="/c/2"))
    assert await garbage(store) == ["/c/1"]
    await store.write(lambda conn: checkpoint_records.mark_removed(conn, number))
    assert await garbage(store) == []


async def test_an_expired_checkpoint_is_not_found_and_its_name_is_free(store: Store, model: ModelRow) -> None:
    await add(store, replace(new(model), expires_at=time.time() - 1))
    await add(store, replace(new(model, "b", "/c/b"), expires_at=time.time() + 3600))
    assert await find(store, model) is None
    assert await find(store, model, "b") is not None
    assert await garbage(store) == ["/c/1"]
    await add(store, new(model, directory="/c/2"))
    assert await find(store, model) is not None


async def test_the_last_checkpoint_is_the_newest_live_one(store: Store, model: ModelRow) -> None:
    for name in ("a", "b", "c"):
        await add(store, new(model, name, f"/c/{name}"))
    await delete(store, model, "c")
    with reading(store) as conn:
        last = checkpoint_records.latest_for_model(conn, model.key, WEIGHTS)
        none = checkpoint_records.latest_for_model(conn, model.key, SAMPLER)
    assert last is not None
    assert last.name == "b"
    assert none is None


async def test_a_deleted_checkpoint_stays_on_disk_while_a_sampling_session_holds_it(
    store: Store, session: SessionId, model: ModelRow
) -> None:
    version = await store.write(
        lambda conn: weight_versions.insert_version(conn, model.key, "lora", durable=True)
    )
    await add(store, replace(new(model), version_id=version))
    await store.write(
        lambda conn: sampling_sessions.create(
            conn, session, 0, base_model="tiny", model_path="tinker://p", version_id=version
        )
    )
    await delete(store, model)
    assert await garbage(store) == []
    await finish_session(store, session)
    assert await garbage(store) == ["/c/1"]

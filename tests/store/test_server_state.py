"""The base models that `serve` writes down, and their names in the rows of older servers."""

from dataclasses import replace

from sqlalchemy import Connection

from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.ids import CheckpointKind, SessionId
from skyrl_tinker.domain.values import BaseModelFacts, LoraSpec
from skyrl_tinker.store import checkpoint_records, model_records, sampling_sessions, server_state
from skyrl_tinker.store.checkpoint_records import NewCheckpoint
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.store import Store
from tests.store.support.rows import base_sampler, create, new_session

FACTS = BaseModelFacts(
    "/models/m", ("org/m", "tiny", "/models/m"), "Qwen3ForCausalLM", 512, 128, 2, 1, 64, 64, True, (0,)
)
OTHER = replace(FACTS, directory="/models/o", names=("org/o", "/models/o"))


async def test_they_are_read_as_they_were_written(store: Store) -> None:
    assert await store.read(server_state.get_bases) is None
    for bases in (Bases((FACTS, OTHER)), Bases((OTHER,))):
        await store.write(lambda conn, bases=bases: server_state.put_bases(conn, bases))  # type: ignore[misc]
        assert await store.read(server_state.get_bases) == bases


async def test_rows_of_older_servers_name_them_canonically_from_the_start_on(
    store: Store, session: SessionId, model: ModelRow
) -> None:
    """Such rows have the names that clients used; those of base models that are not served keep theirs."""
    sampler = await base_sampler(store, session)

    def record(conn: Connection) -> None:
        for name, base_model in (("a", "/models/m"), ("b", "org/elsewhere")):
            new = NewCheckpoint(
                model.key, CheckpointKind.WEIGHTS, name, "/nowhere", base_model, LoraSpec(8, 1), 1
            )
            checkpoint_records.add(conn, new, replace=False)

    await store.write(record)

    def names(conn: Connection) -> list[str]:
        rows = (
            model_records.by_key(conn, model.key),
            sampling_sessions.get(conn, sampler),
            *(
                checkpoint_records.find(conn, None, model.model_id, CheckpointKind.WEIGHTS, name)
                for name in "ab"
            ),
        )
        return [row.base_model for row in rows if row is not None]

    assert await store.read(names) == ["tiny", "tiny", "/models/m", "org/elsewhere"]
    await store.write(lambda conn: server_state.put_bases(conn, Bases((OTHER, FACTS))))
    assert await store.read(names) == ["org/m", "org/m", "org/m", "org/elsewhere"]


async def test_rows_keep_up_with_the_names_of_their_base_models(
    store: Store, session: SessionId, model: ModelRow
) -> None:
    """As when `model_name` is removed, changed, or given to another base model."""
    sampler = await base_sampler(store, session)
    new = NewCheckpoint(model.key, CheckpointKind.WEIGHTS, "a", "/nowhere", "tiny", LoraSpec(8, 1), 1)
    await store.write(lambda conn: checkpoint_records.add(conn, new, replace=False))

    def names(conn: Connection) -> set[str]:
        checkpoint = checkpoint_records.find(conn, None, model.model_id, CheckpointKind.WEIGHTS, "a")
        rows = model_records.by_key(conn, model.key), sampling_sessions.get(conn, sampler), checkpoint
        return {row.base_model for row in rows if row is not None}

    for first, other in (("tiny", "o"), ("changed", "tiny"), ("tiny", "changed"), ("/models/m", "/models/o")):
        bases = Bases((replace(FACTS, names=(first, "/models/m")), replace(OTHER, names=(other,))))
        await store.write(lambda conn, bases=bases: server_state.put_bases(conn, bases))  # type: ignore[misc]
        assert await store.read(names) == {first}


async def test_another_base_model_s_rows_keep_their_names(store: Store) -> None:
    model = await create(store, await new_session(store))
    await store.write(lambda conn: server_state.put_bases(conn, Bases((OTHER,))))
    row = await store.read(lambda conn: model_records.by_key(conn, model.key))
    assert row.base_model == "tiny"

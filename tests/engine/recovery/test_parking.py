"""Models of other base models are parked at a start, and come back with theirs."""

from collections.abc import Awaitable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import Connection, update

from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.ids import CheckpointKind, FutureStatus, ModelState
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.engine.recovery import parking
from skyrl_tinker.store import checkpoint_records, model_records, server_state
from skyrl_tinker.store.checkpoint_records import NewCheckpoint
from skyrl_tinker.store.database.tables import Model
from skyrl_tinker.store.futures import cancellation
from skyrl_tinker.store.store import Store
from tests.engine.support import journal
from tests.engine.support.world import FACTS
from tests.support.reads import reading


async def start_with(store: Store, fingerprint: str, name: str = "tiny") -> int:
    sort = partial(parking.sort_models, fingerprints={name: fingerprint})
    return await store.write(sort)


async def test_models_of_another_base_model_are_parked_and_name_both_and_their_last_checkpoint(
    store: Store,
) -> None:
    assert await start_with(store, "first") == 0
    model = await journal.ready_model(store)
    key = await journal.key_of(store, model)
    new = NewCheckpoint(key, CheckpointKind.WEIGHTS, "0007", "/nowhere", "tiny", LoraSpec(8, 1), 1)
    await store.write(lambda conn: checkpoint_records.add(conn, new, replace=False))
    waiting = await journal.submit_step(store, model, 1)
    assert await start_with(store, "first") == 0
    assert await start_with(store, "second", "other") == 1
    row = await journal.model_of(store, model)
    assert row.state is ModelState.PARKED
    failure = await journal.error_of(store, waiting)
    assert failure.category == "server"
    assert failure.message == row.state_reason
    assert "it was trained on base model tiny, and this server trains other;" in failure.message
    assert f"tinker://{model}/weights/0007" in failure.message


async def test_models_come_back_with_their_base_model_whatever_was_served_meanwhile(store: Store) -> None:
    await start_with(store, "first")
    first = await journal.ready_model(store)
    await start_with(store, "second", "other")
    second = await journal.ready_model(store)
    assert await start_with(store, "third", "another") == 2
    assert await start_with(store, "first") == 1
    rows = [await journal.model_of(store, model) for model in (first, second)]
    assert [row.state for row in rows] == [ModelState.READY, ModelState.PARKED]
    assert rows[0].state_reason is None


async def test_models_of_several_base_models_stay_with_their_own(store: Store) -> None:
    """What was made beside another base model is known by its name, whatever is served next."""

    def start(fingerprints: dict[str, str]) -> Awaitable[int]:
        return store.write(partial(parking.sort_models, fingerprints=fingerprints))

    def name(conn: Connection) -> None:
        conn.execute(update(Model).where(Model.model_id == second).values(base_model="other"))

    await start({"tiny": "first", "other": "second"})
    first, second = await journal.ready_model(store), await journal.ready_model(store)
    await store.write(name)
    assert await start({"tiny": "first", "other": "second"}) == 0
    assert await start({"other": "second"}) == 1
    rows = [await journal.model_of(store, model) for model in (first, second)]
    assert [row.state for row in rows] == [ModelState.PARKED, ModelState.READY]
    assert await start({"third": "first", "other": "second"}) == 0
    rows = [await journal.model_of(store, model) for model in (first, second)]
    assert [(row.state, row.base_model) for row in rows] == [
        (ModelState.READY, "third"),
        (ModelState.READY, "other"),
    ]


async def test_models_take_on_the_name_under_which_their_base_model_is_served_now(store: Store) -> None:
    """Their checkpoints would else be of a base model that is not served."""
    await start_with(store, "first")
    model = await journal.ready_model(store)
    await start_with(store, "first", "renamed")
    row = await journal.model_of(store, model)
    assert (row.state, row.base_model) == (ModelState.READY, "renamed")
    await start_with(store, "second", "other")
    assert (await journal.model_of(store, model)).base_model == "renamed"


async def test_models_that_were_made_before_a_change_of_names_are_known_by_their_base_model(
    store: Store,
) -> None:
    """Their checkpoints, too, also where the base model's directory has another name."""

    def start(*bases: tuple[str, str, str]) -> Awaitable[int]:
        served = [replace(FACTS, names=(name, each), directory=each) for name, each, _ in bases]
        fingerprints = {name: fingerprint for name, _, fingerprint in bases}

        def op(conn: Connection) -> int:
            server_state.put_bases(conn, Bases(tuple(served)))
            return parking.sort_models(conn, fingerprints)

        return store.write(op)

    await start(("tiny", "/a", "first"), ("other", "/b", "second"))
    model = await journal.ready_model(store)
    key = await journal.key_of(store, model)
    new = NewCheckpoint(key, CheckpointKind.WEIGHTS, "0007", "/nowhere", "tiny", LoraSpec(8, 1), 1)
    await store.write(lambda conn: checkpoint_records.add(conn, new, replace=False))
    for first, other in (("other", "tiny"), ("/a", "/b"), ("/c", "/b")):
        directory = "/c" if first == "/c" else "/a"
        assert await start((first, directory, "first"), (other, "/b", "second")) == 0
        with reading(store) as conn:
            checkpoint = checkpoint_records.find(conn, None, model, CheckpointKind.WEIGHTS, "0007")
        assert checkpoint is not None
        row = await journal.model_of(store, model)
        assert (row.state, row.base_model) == (ModelState.READY, first)
        assert (row.trained_on, checkpoint.base_model) == ("first", first)
    late = await journal.ready_model(store)
    await store.write(lambda conn: conn.execute(update(Model).values(base_model="/b", trained_on=None)))
    assert await start(("/b", "/c", "first")) == 2, "another one has the name now"
    assert (await journal.model_of(store, late)).trained_on == "second"


async def test_a_model_that_could_not_be_read_is_tried_again_by_the_next_start_of_its_base_model(
    store: Store,
) -> None:
    await start_with(store, "first")
    model = await journal.ready_model(store)
    key = await journal.key_of(store, model)
    await store.write(lambda conn: model_records.set_state(conn, key, ModelState.PARKED, "unreadable"))
    await start_with(store, "second", "other")
    assert (await journal.model_of(store, model)).state is ModelState.PARKED
    await start_with(store, "first")
    assert (await journal.model_of(store, model)).state is ModelState.READY


async def test_other_files_under_the_same_name_are_another_base_model(store: Store) -> None:
    await start_with(store, "first")
    model = await journal.ready_model(store)
    await start_with(store, "second")
    reason = (await journal.model_of(store, model)).state_reason or ""
    assert "the files of base model tiny are others than those that it was trained on" in reason
    assert "no checkpoint" in reason


async def test_that_a_model_is_to_be_unloaded_outlives_another_base_model(store: Store) -> None:
    await start_with(store, "first")
    model = await journal.ready_model(store)
    unload = await store.write(lambda conn: cancellation.submit_unload(conn, None, model))
    await start_with(store, "second")
    assert (await journal.outcome(store, unload)).status is FutureStatus.PENDING


async def test_models_of_one_whose_weights_were_never_here_at_a_start_are_no_other_ones(store: Store) -> None:
    """As of one that was fetched while the first one served."""

    async def start(**fingerprints: str | None) -> tuple[ModelState, str, str | None]:
        await store.write(partial(parking.sort_models, fingerprints=fingerprints))
        row = await journal.model_of(store, model)
        return row.state, row.base_model, row.trained_on

    await store.write(partial(parking.sort_models, fingerprints={"tiny": "first", "hub": None}))
    model = await journal.ready_model(store)
    await store.write(lambda conn: conn.execute(update(Model).values(base_model="hub")))
    assert await start(tiny="first", hub=None) == (ModelState.READY, "hub", None)
    for _ in range(2):
        assert await start(tiny="first") == (ModelState.PARKED, "hub", None)
    assert await start(tiny="first", hub=None) == (ModelState.PARKED, "hub", None)
    assert await start(tiny="first", hub="second") == (ModelState.READY, "hub", "second")
    assert await start(tiny="first", hub=None) == (ModelState.READY, "hub", "second")


async def test_the_first_one_that_cannot_be_read_leaves_its_models_to_no_other(store: Store) -> None:
    model = await journal.ready_model(store)
    await store.write(partial(parking.sort_models, fingerprints={"tiny": None, "other": "second"}))
    row = await journal.model_of(store, model)
    assert (row.state, row.trained_on) == (ModelState.READY, None)


@pytest.mark.parametrize("index", [None, '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'])
def test_one_whose_weights_are_on_their_way_has_no_fingerprint(tmp_path: Path, index: str | None) -> None:
    (tmp_path / "config.json").write_text("{}")
    if index is not None:
        (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=r"no weights yet|not there"):
        parking.fingerprint(tmp_path)


def test_base_models_differ_by_configuration_or_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"a")
    found = [parking.fingerprint(tmp_path)]
    (tmp_path / "model.safetensors").write_bytes(b"b")
    found.append(parking.fingerprint(tmp_path))
    (tmp_path / "config.json").write_text("{ }")
    found.append(parking.fingerprint(tmp_path))
    assert len(set(found)) == 3
    (tmp_path / "consolidated.safetensors").write_bytes(b"a")  # not served
    assert parking.fingerprint(tmp_path) == found[-1]

"""Leftovers of a dead engine: half-written directories go, and models of another base model are lost."""

import os
from functools import partial
from pathlib import Path

from sqlalchemy import Connection

from skyrl_tinker.domain.ids import CheckpointKind, ModelId, ModelState, RequestKind
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.engine.recovery.leftovers import (
    fingerprint,
    give_up_foreign_models,
    list_abandoned,
    list_saves,
    remove,
    sweep_partial,
    sweep_unrecorded,
)
from skyrl_tinker.store import checkpoint_records, model_records
from skyrl_tinker.store.checkpoint_records import NewCheckpoint
from skyrl_tinker.store.futures import finish
from skyrl_tinker.store.store import Store
from tests.engine.support import journal


async def ready_model(store: Store) -> ModelId:
    accepted = await journal.submit_create(store, await journal.new_session(store))
    assert accepted.model_id is not None
    key = await journal.key_of(store, accepted.model_id)
    done = await journal.outcome(store, accepted)
    await store.write(lambda conn: model_records.set_state(conn, key, ModelState.READY))
    await store.write(lambda conn: finish.succeed(conn, done.future_id, "application/json", b"{}"))
    return accepted.model_id


def list_directories(root: Path) -> list[Path]:
    return list(root.glob("*/*/*"))


async def start_with(store: Store, base_model: str) -> int:
    return await store.write(partial(give_up_foreign_models, fingerprint=base_model))


async def test_models_of_another_base_model_are_lost_and_name_their_last_checkpoint(store: Store) -> None:
    assert await start_with(store, "first") == 0
    model = await ready_model(store)
    key = await journal.key_of(store, model)
    new = NewCheckpoint(key, CheckpointKind.WEIGHTS, "0007", "/nowhere", "tiny", LoraSpec(8, 1), 1)
    await store.write(lambda conn: checkpoint_records.add(conn, new, replace=False))
    waiting = await journal.submit_step(store, model, 1)
    assert await start_with(store, "first") == 0
    assert await start_with(store, "second") == 1
    row = await journal.model_of(store, model)
    assert row.state is ModelState.LOST
    failure = await journal.error_of(store, waiting)
    assert failure.category == "server"
    assert failure.message == row.state_reason
    assert "another base model" in failure.message
    assert f"tinker://{model}/weights/0007" in failure.message


async def test_a_model_without_checkpoint_says_so(store: Store) -> None:
    await start_with(store, "first")
    model = await ready_model(store)
    await start_with(store, "second")
    assert "no checkpoint" in ((await journal.model_of(store, model)).state_reason or "")


def test_base_models_differ_by_configuration_or_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    found = [fingerprint(tmp_path)]
    (tmp_path / "model.safetensors").write_bytes(b"a")
    found.append(fingerprint(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"b")
    found.append(fingerprint(tmp_path))
    (tmp_path / "config.json").write_text("{ }")
    found.append(fingerprint(tmp_path))
    assert len(set(found)) == 4
    (tmp_path / "consolidated.safetensors").write_bytes(b"a")  # not served
    assert fingerprint(tmp_path) == found[-1]


def test_what_was_half_written_goes_whoever_wrote_it(tmp_path: Path) -> None:
    for name in (".v3.partial", "..v4.partial.tmp", ".0007.1a2b.tmp", "0007", "v2"):
        (tmp_path / name).mkdir()
    sweep_partial([tmp_path, tmp_path / "absent"])
    assert {path.name for path in tmp_path.iterdir()} == {"0007", "v2"}


async def test_tries_of_saves_that_were_not_recorded_go_and_what_is_unknown_stays(
    store: Store, tmp_path: Path
) -> None:
    model = await ready_model(store)
    key = await journal.key_of(store, model)
    saved = await journal.submit(store, model, 1, RequestKind.SAVE_WEIGHTS)
    number = (await journal.outcome(store, saved)).future_id
    step = (await journal.outcome(store, await journal.submit_step(store, model, 2))).future_id
    of_model = tmp_path / str(key) / "weights"
    recorded, removed = of_model / f"a~{number}.0a1b2c3d", of_model / "b~7"
    died, newer = of_model / f"a~{number}.ffffffff", of_model / f"a~{number + 1000}.ffffffff"
    others = [of_model / f"a~{step}.ffffffff", of_model / "mine", tmp_path / "99" / "weights" / f"a~{number}"]
    for directory in (recorded, removed, died, newer, *others):
        directory.mkdir(parents=True)

    def record(conn: Connection) -> None:
        for name, directory in (("a", recorded), ("b", removed)):
            new = NewCheckpoint(key, CheckpointKind.WEIGHTS, name, str(directory), "tiny", LoraSpec(8, 1), 1)
            number = checkpoint_records.add(conn, new, replace=False)
        checkpoint_records.mark_removed(conn, number)

    await store.write(record)
    remove(await store.write(partial(list_abandoned, saves=list_saves(tmp_path))))
    assert set(list_directories(tmp_path)) == {recorded, newer, *others}


def test_what_others_write_is_not_half_written_before_a_day_is_over(tmp_path: Path) -> None:
    """They go on while an engine starts."""
    names = [".copy-1.partial", ".import-1.partial"]
    for name in names:
        (tmp_path / name).mkdir()
    sweep_partial([tmp_path])
    sweep_unrecorded(tmp_path, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    for name in names:
        os.utime(tmp_path / name, (0, 0))
    sweep_unrecorded(tmp_path, [])
    assert list(tmp_path.iterdir()) == []


def test_copies_and_imports_that_nobody_recorded_go_after_a_day(tmp_path: Path) -> None:
    recorded = tmp_path / "copy-1" / "weights" / "a"
    old = [tmp_path / name for name in ("copy-1", "copy-2", "import-3", "7")]
    for directory in (recorded, *old, tmp_path / "copy-4"):
        directory.mkdir(parents=True, exist_ok=True)
    for directory in old:
        os.utime(directory, (0, 0))
    sweep_unrecorded(tmp_path, [str(recorded)])
    assert {path.name for path in tmp_path.iterdir()} == {"copy-1", "7", "copy-4"}

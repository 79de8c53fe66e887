"""copy_weights: files of its own, a run of its own, once per request."""

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from skyrl_tinker.api.resources import weight_copies
from skyrl_tinker.domain import tinker_path
from skyrl_tinker.domain.ids import CheckpointKind
from skyrl_tinker.domain.values import WeightVersion
from skyrl_tinker.store import checkpoint_records, weight_versions
from skyrl_tinker.store.database.group_commit import Op, T
from skyrl_tinker.store.store import Store
from skyrl_tinker.system.off_loop import LOAD_THREADS, TRANSFER_THREADS, in_transfer_thread
from tests.api.support.users import get, new_user, speak_as
from tests.api.support.world import BASE, Json, World, new_home, running, step
from tests.support.reads import reading
from tests.support.waiting import hold, holding, until

WEIGHTS, SAMPLER, EXTERNAL = CheckpointKind
PROJECT = {"destination_project_id": "archive"}


async def saved(world: World, kind: CheckpointKind = WEIGHTS, **changes: object) -> str:
    directory = world.settings.checkpoint_root / "1" / kind / "a"
    (directory / "deep").mkdir(parents=True)
    (directory / "weights.bin").write_bytes(b"123")
    (directory / "deep" / "more.bin").write_bytes(b"45")
    run = await world.model(user_metadata={"renderer": "qwen3"})
    fields = {"directory": str(directory), "user_metadata": {"k": "v"}, "has_optimizer": True, **changes}
    return await world.checkpoint(run, kind, "a", **fields)


async def copy(world: World, source: str, where: Json = PROJECT, key: str = "k", **fields: object) -> str:
    answer = await world.post(
        "copy_weights", {"source_path": source, **where, **fields}, **{"X-Idempotency-Key": key}
    )
    assert answer.status_code == 200, answer.text
    return str(answer.json()["tinker_path"])


async def row(world: World, path: str) -> checkpoint_records.CheckpointRow:
    where = tinker_path.parse(path)
    with reading(world.store) as conn:
        found = checkpoint_records.find(conn, None, where.model_id, where.kind, where.name)
    assert found is not None
    return found


def contents(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*.bin")}


def left(world: World) -> list[Path]:
    return sorted(world.settings.checkpoint_root.glob("*copy*"))


@pytest.mark.parametrize("kind", list(CheckpointKind))
async def test_a_copy_has_all_that_its_original_has(world: World, kind: CheckpointKind) -> None:
    source = await saved(world, kind, expires_at=4e9)
    path = await copy(world, source)
    original, made = await row(world, source), await row(world, path)
    assert path == f"tinker://{made.model_id}/{kind}/a"
    for field in ("kind", "name", "base_model", "spec", "has_optimizer", "size_bytes", "user_metadata"):
        assert getattr(made, field) == getattr(original, field)
    assert made.expires_at is None
    shutil.rmtree(original.directory)
    assert contents(Path(made.directory)) == {"weights.bin": b"123", "deep/more.bin": b"45"}
    run = await get(world, f"training_runs/{made.model_id}")
    assert (run["base_model"], run["user_metadata"], run["corrupted"]) == (BASE, {"renderer": "qwen3"}, False)


async def test_however_much_is_copied_a_file_can_be_read(world: World) -> None:
    source, go_on = await saved(world, CheckpointKind.WEIGHTS), threading.Event()
    begun = hold(world.patch, weight_copies, "_copy_files", go_on)
    copies = [asyncio.create_task(copy(world, source)) for _ in range(2 * TRANSFER_THREADS)]
    async with holding(go_on, copies):
        await until(lambda: len(begun) >= LOAD_THREADS)
        assert await in_transfer_thread(lambda: 7) == 7


async def test_however_much_one_key_copies_another_key_copies_too(world: World) -> None:
    alice, bob = [await new_user(world, name) for name in ("alice", "bob")]
    speak_as(world, alice)
    source, go_on = await saved(world), threading.Event()
    run = tinker_path.parse(source).model_id
    assert (await world.post(f"training_runs/{run}/checkpoints/weights/a/publish", {})).status_code == 200
    half = LOAD_THREADS // 2
    begun: list[Any] = hold(
        world.patch, weight_copies, "_copy_files", go_on, only=lambda *_: len(begun) <= half
    )
    copies = [asyncio.create_task(copy(world, source, key=str(each))) for each in range(LOAD_THREADS)]
    async with holding(go_on, copies):
        await until(lambda: len(begun) == half)
        speak_as(world, bob)
        await copy(world, source)
        assert len(begun) == half + 1
    assert len({each.result() for each in copies}) == LOAD_THREADS


async def test_copied_sampler_weights_are_a_version_of_their_own(world: World) -> None:
    made = await row(world, await copy(world, await saved(world, SAMPLER)))
    assert made.version_id is not None
    version = await world.store.read(lambda conn: weight_versions.published_version(conn, made.version_id))
    assert version == WeightVersion(made.version_id, "lora", made.directory)
    await world.sampler(model_path=made.path)


async def test_a_copy_costs_no_space(world: World) -> None:
    source = await saved(world)
    made = await row(world, await copy(world, source))
    files = [Path((each).directory) / "weights.bin" for each in (made, await row(world, source))]
    assert files[0].samefile(files[1])


async def test_a_copy_lies_in_its_project_in_a_finished_session_and_cannot_be_trained(world: World) -> None:
    run = (await row(world, await copy(world, await saved(world)))).model_id
    (found,) = (await world.ok("sessions/search", {"project_ids": ["archive"]}))["sessions"]
    assert run.startswith(found["session_id"])
    assert found["status"]["reason"] == {"type": "success"}
    assert (await world.post("optim_step", step(run, 1))).status_code == 410


async def test_the_same_request_again_gives_the_same_copy(world: World) -> None:
    source = await saved(world)
    together = await asyncio.gather(*(copy(world, source) for _ in range(4)))
    where = tinker_path.parse(source)
    await world.http.delete(f"training_runs/{where.model_id}/checkpoints/{where.checkpoint_id}")
    assert {*together, await copy(world, source)} == {together[0]}
    assert len(left(world)) == 1


async def test_another_key_makes_another_copy_and_another_request_needs_another_key(world: World) -> None:
    source = await saved(world)
    assert await copy(world, source, key="a") != await copy(world, source, key="b")
    again = {"source_path": source, "destination_project_id": "elsewhere"}
    answer = await world.post("copy_weights", again, **{"X-Idempotency-Key": "a"})
    assert answer.status_code == 422
    assert "copy_weights with another payload" in answer.json()["detail"]


async def test_a_copy_into_a_session_takes_a_number_of_its_runs(world: World) -> None:
    source, session = await saved(world), await world.session()
    where = {"session_id": session, "model_seq_id": 3}
    path = await copy(world, source, where, "a")
    assert path == f"tinker://{session}:train:3/weights/a"
    assert await copy(world, source, where, "b") == path
    taken = {"session_id": session, "model_seq_id": 3, "base_model": BASE}
    assert (await world.post("create_model", taken)).status_code == 422
    assert (await get(world, f"sessions/{session}"))["training_run_ids"] == [f"{session}:train:3"]


async def test_a_copy_may_expire(world: World) -> None:
    made = await row(world, await copy(world, await saved(world), ttl_seconds=7200))
    assert made.expires_at == pytest.approx(made.created_at + 7200, abs=1)


async def test_a_copy_without_a_time_to_live_has_that_of_the_server(tmp_path: Path) -> None:
    async with running(new_home(tmp_path, retention={"checkpoints_s": 3600})) as world:
        made = await row(world, await copy(world, await saved(world)))
    assert made.expires_at == pytest.approx(made.created_at + 3600, abs=1)


WRONG: list[tuple[Json, int, str]] = [
    ({"source_path": "tinker://no/weights/a"}, 404, "tinker://no/weights/a"),
    ({"source_path": "a"}, 400, "'a' is not a checkpoint path"),
    ({"destination_project_id": None}, 400, "destination_project_id"),
    ({"session_id": "s", "model_seq_id": 0}, 400, "found destination_project_id='archive'"),
    ({"destination_project_id": None, "session_id": "s"}, 400, "model_seq_id=None"),
    ({"destination_project_id": None, "session_id": "s", "model_seq_id": 0}, 404, "no session s"),
    ({"ttl_seconds": 1}, 400, "ttl_seconds"),
]


async def test_a_copy_that_cannot_be_leaves_nothing(world: World) -> None:
    source = await saved(world)
    for change, status, message in WRONG:
        answer = await world.post("copy_weights", {"source_path": source, **PROJECT} | change)
        assert answer.status_code == status, change
        assert message in answer.json()["detail"]
    assert left(world) == []


async def test_a_copy_whose_commit_was_taken_for_failed_keeps_its_files(world: World) -> None:
    source, write, doubts = (
        await saved(world),
        Store.write,
        [OperationalError("COMMIT", None, OSError("cut"))],
    )

    async def doubtful(store: Store, op: Op[T], then: Any = None, size: int = 0) -> T:
        value = await write(store, op, then, size)
        if doubts and left(world):
            raise doubts.pop()
        return value

    world.patch.setattr(Store, "write", doubtful)
    answer = await world.post(
        "copy_weights", {"source_path": source, **PROJECT}, **{"X-Idempotency-Key": "k"}
    )
    assert answer.status_code == 503
    made = await row(world, await copy(world, source))
    assert contents(Path(made.directory)) == {"weights.bin": b"123", "deep/more.bin": b"45"}
    assert len(left(world)) == 1


async def test_files_that_went_meanwhile_are_a_checkpoint_that_is_not_there(world: World) -> None:
    source = await saved(world)
    shutil.rmtree((await row(world, source)).directory)
    answer = await world.post("copy_weights", {"source_path": source, **PROJECT})
    assert answer.status_code == 404
    assert "was deleted" in answer.json()["detail"]
    assert left(world) == []


async def test_others_copy_what_is_published(world: World) -> None:
    alice, bob = await new_user(world, "alice"), await new_user(world, "bob")
    speak_as(world, alice)
    source = await saved(world)
    speak_as(world, bob)
    assert (await world.post("copy_weights", {"source_path": source, **PROJECT})).status_code == 404
    speak_as(world, alice)
    where = tinker_path.parse(source)
    await world.http.post(f"training_runs/{where.model_id}/checkpoints/{where.checkpoint_id}/publish")
    mine = await copy(world, source)
    speak_as(world, bob)
    his = await copy(world, source)
    assert his != mine
    assert [each["tinker_path"] for each in (await get(world, "checkpoints"))["checkpoints"]] == [his]
    assert (await get(world, "checkpoints"))["checkpoints"][0]["public"] is False

"""Saves, training runs and the checkpoints in them."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from skyrl_tinker.domain.ids import CheckpointKind, FutureStatus
from skyrl_tinker.store.futures import queue
from tests.api.support.world import World, new_home, running

WEIGHTS, SAMPLER = CheckpointKind.WEIGHTS, CheckpointKind.SAMPLER_WEIGHTS
YEAR = 365 * 86400


async def test_a_save_of_an_old_sdk_with_nulls_is_accepted(world: World) -> None:
    model = await world.model()
    body = {"model_id": model, "seq_id": 1, "path": "one", "ttl_seconds": None, "user_metadata": None}
    await world.ok("save_weights", body)
    await world.ok("save_weights_for_sampler", {**body, "seq_id": 2})
    assert {row.status for row in await world.queued()} == {FutureStatus.PENDING}


async def test_a_save_without_a_time_to_live_has_that_of_the_server(tmp_path: Path) -> None:
    async with running(new_home(tmp_path, retention={"checkpoints_s": 7200})) as world:
        save = {"model_id": await world.model(), "path": "one"}
        ephemeral = {**save, "path": None, "sampling_session_seq_id": 1}
        for number, (route, body) in enumerate(
            [
                ("save_weights", save),
                ("save_weights", {**save, "ttl_seconds": 3600}),
                ("save_weights_for_sampler", save),
                ("save_weights_external", save),
                ("save_weights_for_sampler", ephemeral),
            ]
        ):
            await world.ok(route, {**body, "seq_id": number + 1})
        rows = await world.queued()
        bodies = await world.store.read(lambda conn: queue.read_bodies(conn, [row.id for row in rows]))
        given = [json.loads(bodies[row.id])["ttl_seconds"] for row in rows if row.seq_id]
        assert given == [7200, 3600, 7200, 7200, None]


@pytest.mark.parametrize("route", ["save_weights", "save_weights_for_sampler"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "../up"}, "../up"),
        ({"path": "a b"}, "a b"),
        ({"path": 5}, "path"),
        ({"ttl_seconds": 60}, "ttl_seconds"),
        ({"ttl_seconds": 11 * YEAR}, "ttl_seconds"),
        ({"user_metadata": {"a": 1}}, "user_metadata"),
    ],
)
async def test_a_bad_save_is_accepted_and_fails(
    world: World, route: str, change: dict[str, Any], message: str
) -> None:
    body = {"model_id": await world.model(), "seq_id": 1, "path": "one", **change}
    assert message in await world.failure((await world.ok(route, body))["request_id"])


@pytest.mark.parametrize("route", ["save_weights", "save_weights_for_sampler"])
async def test_a_save_with_much_wrong_metadata_fails_in_few_words(world: World, route: str) -> None:
    body = {"model_id": await world.model(), "seq_id": 1, "path": "one"}
    wrong = {f"key {number}": number for number in range(2000)}
    said = await world.failure((await world.ok(route, {**body, "user_metadata": wrong}))["request_id"])
    assert said == "user_metadata.key 0: Input should be a valid string, found 0"


async def test_a_name_too_long_fails_in_few_words(world: World) -> None:
    body = {"model_id": await world.model(), "seq_id": 1, "path": "x" * 1_000_000}
    said = await world.failure((await world.ok("save_weights", body))["request_id"])
    assert said.startswith("path: String should have at most 512 characters, found 'xxx")
    assert len(said) < 200


async def test_a_named_save_cannot_be_inflight(world: World) -> None:
    body = {"model_id": await world.model(), "seq_id": 1, "path": "one", "kind": "inflight"}
    assert "inflight" in await world.failure((await world.ok("save_weights_for_sampler", body))["request_id"])


async def test_a_sampler_save_is_either_named_or_ephemeral(world: World) -> None:
    body = {"model_id": await world.model(), "seq_id": 1}
    neither = await world.ok("save_weights_for_sampler", body)
    both = await world.ok(
        "save_weights_for_sampler", {**body, "seq_id": 2, "path": "one", "sampling_session_seq_id": 0}
    )
    for accepted in (neither, both):
        assert "sampling_session_seq_id" in await world.failure(accepted["request_id"])


async def test_an_ephemeral_save_sent_again_under_another_sampling_number_is_the_same(world: World) -> None:
    body = {"model_id": await world.model(), "seq_id": 1, "kind": "snapshot"}
    answers = [
        await world.ok("save_weights_for_sampler", {**body, "sampling_session_seq_id": number})
        for number in (0, 1, 2)
    ]
    assert answers == answers[:1] * 3
    assert len(await world.queued()) == 2


async def test_a_training_run_shows_its_last_checkpoints_and_only_string_metadata(world: World) -> None:
    model = await world.model(user_metadata={"name": "x", "steps": 3, "nested": {"a": [None]}})
    await world.checkpoint(model, WEIGHTS, "one")
    await world.checkpoint(model, WEIGHTS, "two", user_metadata={"k": "v"}, expires_at=4e9)
    await world.checkpoint(model, SAMPLER, "s")
    run = (await world.http.get(f"training_runs/{model}", params={"access_scope": "owned"})).json()
    assert run["training_run_id"] == model
    assert run["user_metadata"] == {"name": "x", "steps": "3", "nested": '{"a":[null]}'}
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/two"
    assert run["last_checkpoint"]["checkpoint_type"] == "training"
    assert run["last_sampler_checkpoint"]["tinker_path"] == f"tinker://{model}/sampler_weights/s"
    times = (run["last_request_time"], run["last_checkpoint"]["time"], run["last_checkpoint"]["expires_at"])
    assert all(datetime.fromisoformat(text).tzinfo for text in times)
    assert (await world.http.get("training_runs/no")).status_code == 404


async def test_a_deleted_checkpoint_is_gone_for_everybody(world: World) -> None:
    model = await world.model()
    path = await world.checkpoint(model, WEIGHTS, "one")
    url = f"training_runs/{model}/checkpoints/weights/one"
    assert (await world.http.delete(url)).status_code == 200
    assert (await world.http.delete(url)).status_code == 404
    assert (await world.post("weights_info", {"tinker_path": path})).status_code == 404


@pytest.mark.parametrize("checkpoint", ["one", "nonsense/one", "weights/a%20b", "weights/a/b"])
async def test_a_malformed_checkpoint_id_is_400(world: World, checkpoint: str) -> None:
    answer = await world.http.delete(f"training_runs/{await world.model()}/checkpoints/{checkpoint}")
    assert answer.status_code == 400

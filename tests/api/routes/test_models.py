"""Models: made once per model_seq_id, described at once, made again from checkpoints."""

from typing import Any

import pytest

from skyrl_tinker.domain.ids import CheckpointKind, FutureStatus, RequestKind
from tests.api.support.world import BASE, World, step


async def test_a_model_id_is_made_of_session_and_number(world: World) -> None:
    session = await world.session()
    assert await world.model(session, 0) == f"{session}:train:0"
    assert await world.model(session, 1) == f"{session}:train:1"


async def test_the_same_creation_again_is_the_same_model_and_promise(world: World) -> None:
    body = {
        "session_id": await world.session(),
        "model_seq_id": 0,
        "base_model": BASE,
        "lora_config": {"rank": 8},
    }
    first, again = await world.ok("create_model", body), await world.ok("create_model", body)
    assert first == again
    assert len(await world.queued()) == 1
    other = {**body, "lora_config": {"rank": 4}}
    assert (await world.post("create_model", other)).status_code == 422


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_model": "no/such"}, "no/such"),
        ({"lora_config": {"rank": 1000}}, "max_lora_rank"),
        ({"lora_config": {"rank": -1}}, "rank"),
        ({"lora_config": {"train_mlp": False, "train_attn": False, "train_unembed": False}}, "train_mlp"),
        ({"optimizer_config": {"type": "dimuon", "version": 2}}, "optimizer_config.version"),
        ({"optimizer_config": {"type": ["adamw"]}}, "optimizer_config.type is ['adamw'], expected one of"),
    ],
)
async def test_a_wrong_model_is_accepted_and_its_future_fails(
    world: World, change: dict[str, Any], message: str
) -> None:
    body = {
        "session_id": await world.session(),
        "model_seq_id": 0,
        "base_model": BASE,
        "lora_config": {"rank": 8},
        **change,
    }
    assert message in await world.failure((await world.ok("create_model", body))["request_id"])


async def test_get_info_works_right_after_creation(world: World) -> None:
    model = await world.model(lora_config={"rank": 4})
    info = await world.ok("get_info", {"model_id": model, "type": "get_info"})
    assert info["model_id"] == model
    assert info["model_data"] == {
        "arch": "Qwen3ForCausalLM",
        "model_name": BASE,
        "tokenizer_id": "/models/tiny",
    }
    assert (info["is_lora"], info["lora_rank"]) == (True, 4)
    assert info["optimizer_config"] == {"type": "adamw"}
    assert (await world.post("get_info", {"model_id": "no"})).status_code == 404


async def test_a_models_optimizer_is_told_by_get_info(world: World) -> None:
    dimuon = {"type": "dimuon", "version": 1}
    model = await world.model(optimizer_config=dimuon)
    assert (await world.ok("get_info", {"model_id": model}))["optimizer_config"] == dimuon


async def test_rank_0_is_full_parameters(world: World) -> None:
    info = await world.ok("get_info", {"model_id": await world.model(lora_config={"rank": 0})})
    assert (info["is_lora"], info["lora_rank"]) == (False, None)


async def load(world: World, path: str, **changes: Any) -> dict[str, Any]:
    body = {"session_id": await world.session(), "model_seq_id": 0, "path": path, "optimizer": False}
    return await world.ok("load_weights", {**body, **changes})


async def test_a_model_from_a_checkpoint_is_known_at_once(world: World) -> None:
    source = await world.model(lora_config={"rank": 4, "train_mlp": False, "seed": 3})
    path = await world.checkpoint(source, CheckpointKind.WEIGHTS, "one", has_optimizer=True)
    accepted = await load(world, path, optimizer=True)
    info = await world.ok("get_info", {"model_id": accepted["model_id"]})
    assert (info["model_name"], info["lora_rank"]) == (BASE, 4)
    row = (await world.queued())[-1]
    assert (row.kind, row.seq_id, row.status) == (RequestKind.LOAD_WEIGHTS, 0, FutureStatus.PENDING)
    assert (await world.ok("optim_step", step(accepted["model_id"], 1)))["request_id"]


async def test_the_same_load_again_is_the_same_model(world: World) -> None:
    path = await world.checkpoint(await world.model(), CheckpointKind.WEIGHTS, "one")
    body = {"session_id": await world.session(), "model_seq_id": 0, "path": path, "optimizer": False}
    assert await world.ok("load_weights", body) == await world.ok("load_weights", body)
    assert len(await world.queued()) == 2


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("tinker://no:train:0/weights/one", "tinker://no:train:0/weights/one"),
        ("file:///etc/passwd", "file:///etc/passwd"),
        ("tinker://a/b/c/d", "b/c/d"),
    ],
)
async def test_a_load_from_an_unknown_or_malformed_path_fails_its_future(
    world: World, path: str, message: str
) -> None:
    assert message in await world.failure((await load(world, path))["request_id"])


async def test_a_load_that_asks_for_what_is_not_there_fails_its_future(world: World) -> None:
    model = await world.model()
    plain = await world.checkpoint(model, CheckpointKind.WEIGHTS, "plain")
    sampler = await world.checkpoint(model, CheckpointKind.SAMPLER_WEIGHTS, "plain")
    foreign = await world.checkpoint(model, CheckpointKind.WEIGHTS, "foreign", base_model="other/model")
    assert "optimizer" in await world.failure((await load(world, plain, optimizer=True))["request_id"])
    assert "sampler_weights" in await world.failure((await load(world, sampler))["request_id"])
    assert "other/model" in await world.failure((await load(world, foreign))["request_id"])


async def test_a_load_in_place_takes_its_turn_and_is_not_judged_by_what_exists_yet(world: World) -> None:
    """The save that makes the path may stand before it in the same lane."""
    model = await world.model()
    body = {"model_id": model, "seq_id": 1, "path": f"tinker://{model}/weights/soon"}
    await world.ok("load_weights", body)
    assert (await world.queued())[-1].status is FutureStatus.PENDING
    wrong = await world.ok("load_weights", {**body, "seq_id": 2, "path": "soon"})
    assert "soon" in await world.failure(wrong["request_id"])


async def test_weights_info_tells_what_a_checkpoint_holds(world: World) -> None:
    model = await world.model(lora_config={"rank": 4, "train_unembed": False})
    path = await world.checkpoint(model, CheckpointKind.WEIGHTS, "one")
    info = await world.ok("weights_info", {"tinker_path": path})
    assert (info["base_model"], info["is_lora"], info["lora_rank"]) == (BASE, True, 4)
    assert (info["train_mlp"], info["train_unembed"]) == (True, False)
    missing = await world.post("weights_info", {"tinker_path": f"{path}-not"})
    assert missing.status_code == 404


@pytest.mark.parametrize("route", ["create_model", "load_weights"])
async def test_a_base_model_with_a_long_name_leaves_no_run(world: World, route: str) -> None:
    body = {"session_id": await world.session(), "model_seq_id": 0, "base_model": "x" * 600, "path": "p"}
    if route == "create_model":
        del body["path"]
    answer = await world.post(route, body)
    assert answer.status_code == 400
    assert answer.json()["detail"].startswith("base_model: String should have at most 512 characters")
    assert (await world.http.get("training_runs")).json()["training_runs"] == []

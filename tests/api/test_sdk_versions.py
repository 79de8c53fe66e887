"""Requests and responses of other SDK versions, recorded from their wheels: they mean the same."""

from collections.abc import Mapping

import pytest

from skyrl_tinker.domain.ids import CheckpointKind, ModelId, RequestKind
from skyrl_tinker.protocol.protobuf import pass_requests
from skyrl_tinker.protocol.schemas.usage import StorageUsage
from skyrl_tinker.protocol.stored_requests import LoadWeightsBody
from skyrl_tinker.store.futures import queue
from tests.api.support.world import BASE, Json, World, step
from tests.engine.support import journal

LORA = {"rank": 8, "seed": 1, "train_unembed": True, "train_mlp": True, "train_attn": True}
TARGETS = {"data": [3, 4], "dtype": "int64", "shape": [2]}
WEIGHTS = {"data": [1.0, 1.0], "dtype": "float32", "shape": [2]}
INPUTS = {"target_tokens": TARGETS, "weights": WEIGHTS}
OLD_DATUM = {"loss_fn_inputs": INPUTS, "model_input": {"chunks": [{"tokens": [2, 3]}]}}
DATUM = {"loss_fn_inputs": INPUTS, "model_input": {"chunks": [{"tokens": [2, 3], "type": "encoded_text"}]}}
OLD_PASS = {"data": [OLD_DATUM], "loss_fn": "cross_entropy", "loss_fn_config": None}
PASS = {"data": [DATUM], "loss_fn": "cross_entropy"}
ADAM = {
    "learning_rate": 0.01,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}
PATH = "tinker://s:train:0/weights/w"

# Of each request the forms of 0.3, of 0.15, of 0.24 (passes) or 0.38, without model_id and seq_id.
TRAINING: Mapping[str, tuple[Json, ...]] = {
    "forward_backward": ({"forward_backward_input": OLD_PASS}, {"forward_backward_input": PASS}),
    "forward": ({"forward_input": OLD_PASS}, {"forward_input": PASS}),
    "optim_step": ({"adam_params": {"learning_rate": 0.01}}, {"adam_params": ADAM, "type": "optim_step"}),
    "save_weights": (
        {"path": "w"},
        {"path": "w", "ttl_seconds": None},
        {"path": "w", "overwrite": False, "type": "save_weights"},
    ),
    "save_weights_for_sampler": (
        {"path": "w"},
        {"path": "w", "ttl_seconds": None},
        {"path": "w", "kind": "snapshot", "type": "save_weights_for_sampler"},
    ),
    "load_weights": (
        {"path": PATH},
        {"path": PATH, "optimizer": False},
        {"path": PATH, "optimizer": False, "type": "load_weights"},
    ),
}
SAMPLES: tuple[Json, ...] = (
    {
        "num_samples": 1,
        "prompt": {"chunks": [{"tokens": [7, 31]}]},
        "sampling_params": {"max_tokens": 1, "seed": None},
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 0,
    },
    {
        "num_samples": 1,
        "prompt": {"chunks": [{"tokens": [7, 31], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 1, "temperature": 1.0, "top_k": -1, "top_p": 1.0},
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 0,
        "topk_sample_logprobs": 0,
        "prompt_alt_tokens_k": 0,
        "record_stability_info": False,
        "type": "sample",
    },
)


async def stored(world: World, request_id: str) -> bytes:
    future_id = await world.id_of(request_id)
    return await world.store.read(lambda conn: queue.read_bodies(conn, [future_id])[future_id])


@pytest.mark.parametrize("path", TRAINING)
async def test_a_training_request_is_the_same_from_every_sdk(world: World, path: str) -> None:
    model, bodies = await world.model(), []
    for seq_id, form in enumerate(TRAINING[path], 1):
        answer = await world.ok(path, {**form, "model_id": model, "seq_id": seq_id})
        bodies.append(await stored(world, answer["request_id"]))
    assert b"" not in bodies  # that of a refused request
    if path.startswith("forward"):
        first, second = (pass_requests.from_canonical(body) for body in bodies)
        assert first.forward_only == second.forward_only == (path == "forward")
        assert first.data[0].tokens.tolist() == second.data[0].tokens.tolist() == [2, 3]
        assert first.data[0].target_tokens.tolist() == second.data[0].target_tokens.tolist() == [3, 4]
    else:
        assert len(set(bodies)) == 1


async def test_a_sample_is_the_same_from_every_sdk(world: World) -> None:
    sampler = await world.sampler()
    answers = [
        await world.ok("asample", {**form, "sampling_session_id": sampler, "seq_id": seq_id})
        for seq_id, form in enumerate(SAMPLES)
    ]
    old, new = [await stored(world, answer["request_id"]) for answer in answers]
    assert old == new
    assert old


@pytest.mark.parametrize("user_metadata", [{"user_metadata": None}, {}])
async def test_a_session_and_a_model_bear_what_old_sdks_leave_out(world: World, user_metadata: Json) -> None:
    opened = {"tags": [], "sdk_version": "0.15.0", "project_id": None, **user_metadata}
    session = (await world.ok("create_session", opened))["session_id"]
    wanted = {"model_seq_id": 0, "base_model": BASE, "lora_config": {**LORA, "seed": None}, **user_metadata}
    model = (await world.ok("create_model", {"session_id": session, **wanted}))["model_id"]
    row = await journal.model_of(world.store, ModelId(model))
    assert (row.spec.rank, row.user_metadata, dict(row.optimizer_config)) == (8, {}, {"type": "adamw"})


async def test_a_sampling_session_bears_explicit_nulls(world: World) -> None:
    session = await world.session()
    wanted = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE, "model_path": None}
    assert await world.ok("create_sampling_session", wanted)


async def test_sdk_0_3_resumes_from_a_training_run_and_loads_in_place(world: World) -> None:
    first = await world.model(user_metadata={"a": "b"})
    path = await world.checkpoint(first, CheckpointKind.WEIGHTS, "w")
    run = (await world.http.get(f"training_runs/{first}")).json()
    changes = {"lora_config": {"rank": run["lora_rank"]}, "user_metadata": run["user_metadata"]}
    second = await world.model(base_model=run["base_model"], **changes)
    loaded = await world.ok("load_weights", {"model_id": second, "path": path, "seq_id": 1})
    assert LoadWeightsBody.from_bytes(await stored(world, loaded["request_id"])) == LoadWeightsBody(
        path, False
    )
    assert (await world.queued())[-1].kind is RequestKind.LOAD_WEIGHTS


async def test_sdks_0_6_to_0_36_learn_all_they_need_from_weights_info(world: World) -> None:
    model = await world.model(lora_config={**LORA, "train_unembed": False})
    path = await world.checkpoint(model, CheckpointKind.WEIGHTS, "w")
    info = await world.ok("weights_info", {"tinker_path": path})
    told = {key: info[key] for key in ("base_model", "is_lora", "lora_rank", "train_unembed", "train_mlp")}
    assert told == {
        "base_model": BASE,
        "is_lora": True,
        "lora_rank": 8,
        "train_unembed": False,
        "train_mlp": True,
    }


@pytest.mark.parametrize("version", ["0.18.2", "0.22.0", "0.24.1", "0.36.0"])
async def test_no_flag_asks_an_older_sdk_for_what_is_not_served(world: World, version: str) -> None:
    flags = await world.ok("client/config", {"sdk_version": version})
    assert not {"proto_write_fwdbwd", "grpc_target", "enable_grpc_retrieve_future", "fwd_via_fwdbwd"} & set(
        flags
    )
    assert flags["create_model_via_load_weights"] is True


async def test_a_result_never_waits_behind_its_metadata(world: World) -> None:
    """Older SDKs send no allow_metadata_only, and all crash on a second such answer."""
    request_id = (await world.ok("optim_step", step(await world.model(), 1)))["request_id"]
    large = b'{"metrics":{"%s":1.0}}' % (b"x" * (3 << 20))
    await world.succeed(request_id, "application/json", large)
    for allowed in ({}, {"allow_metadata_only": True}, {"allow_metadata_only": False}):
        answer = await world.post("retrieve_future", {"request_id": request_id, **allowed})
        assert answer.content == large


def test_storage_is_billed_in_fields_that_sdks_up_to_0_28_know() -> None:
    """SDKs up to 0.28 forbid other fields."""
    assert set(StorageUsage(gigabyte_hours=1.0).model_dump()) == {"type", "gigabyte_hours"}

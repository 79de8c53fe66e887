"""Training requests: accepted in any order, once each; a wrong one takes its seq_id and fails."""

import re
from typing import Any

import numpy as np
import pytest
import zstandard
from tinker import types

from skyrl_tinker.domain.ids import FutureStatus, RequestKind
from skyrl_tinker.protocol.protobuf import pass_requests
from skyrl_tinker.store.futures import queue
from tests.api.support.base_facts import VOCABULARY
from tests.api.support.passes import datum, old_json, post_pass, protobuf
from tests.api.support.world import World, step


async def test_chunks_arriving_2_3_1_are_all_accepted_at_once(world: World) -> None:
    model = await world.model()
    for seq_id in (2, 3, 1):
        assert (await post_pass(world, protobuf(model, seq_id))).status_code == 200
    assert [row.seq_id for row in await world.queued()] == [0, 2, 3, 1]


async def test_the_same_pass_again_gives_the_first_promise_and_runs_once(world: World) -> None:
    model = await world.model()
    body = protobuf(model, 1)
    answers = [(await post_pass(world, body, **{"X-Idempotency-Key": key})).json() for key in "ab"]
    assert answers[0] == answers[1]
    assert len(await world.queued()) == 2


async def test_the_idempotency_key_names_no_request(world: World) -> None:
    model = await world.model()
    key = {"X-Idempotency-Key": "a"}
    answers = [(await post_pass(world, protobuf(model, seq_id), **key)).json() for seq_id in (1, 2)]
    assert answers[0]["request_id"] != answers[1]["request_id"]


async def test_the_same_seq_id_with_another_payload_is_422_not_a_retried_409(world: World) -> None:
    model = await world.model()
    assert (await post_pass(world, protobuf(model, 1))).status_code == 200
    other = await post_pass(world, protobuf(model, 1, datum([4, 5])))
    kind = await world.post("optim_step", step(model, 1))
    assert (other.status_code, kind.status_code) == (422, 422)
    assert "seq_id 1" in other.json()["detail"]


async def test_a_pass_is_stored_as_the_engine_reads_it(world: World) -> None:
    model = await world.model()
    await post_pass(world, protobuf(model, 1, datum([4, 5], [0.5, -1.0]), forward_only=True))
    row = (await world.queued())[-1]
    body = await world.store.read(lambda conn: queue.read_bodies(conn, [row.id])[row.id])
    assert row.kind is RequestKind.FORWARD
    value = pass_requests.from_canonical(body)
    assert value.data[0].tokens.tolist() == [4, 5]
    np.testing.assert_array_equal(value.data[0].inputs["weights"], np.array([0.5, -1.0], np.float32))


async def test_json_of_old_sdks_is_the_same_request_as_protobuf(world: World) -> None:
    model = await world.model()
    assert "request_id" in await world.ok("forward_backward", old_json(model, 1))
    assert "request_id" in await world.ok("forward", old_json(model, 2, "forward_input"))
    kinds = [row.kind for row in await world.queued()]
    assert kinds == [RequestKind.CREATE_MODEL, RequestKind.FORWARD_BACKWARD, RequestKind.FORWARD]


async def test_zstd_bodies_and_large_bodies_are_read(world: World) -> None:
    model = await world.model()
    body = protobuf(model, 1, *[datum(list(range(60)))] * 200)
    assert len(body) > 64 * 1024
    packed = zstandard.ZstdCompressor().compress(body)
    assert (await post_pass(world, packed, **{"Content-Encoding": "zstd"})).status_code == 200


async def test_a_zstd_bomb_is_413(world: World) -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(257 << 20))
    answer = await post_pass(world, bomb, **{"Content-Encoding": "zstd"})
    assert answer.status_code == 413
    assert int(answer.headers["content-length"]) > 0


NAN = datum([1, 2], [1.0, float("nan")])
BAD_PASSES: dict[str, tuple[dict[str, Any], list[types.Datum], str]] = {
    "token": ({}, [datum([1]), datum([VOCABULARY])], "datum 1.*512"),
    "nan": ({}, [NAN], "datum 0.*weights"),
    "lengths": ({}, [datum([1, 2], [1.0])], "datum 0.*weights"),
    "loss": ({"loss_fn": "critic"}, [], "critic"),
    "config": ({"loss_fn_config": {"no_such": 1.0}}, [], "no_such"),
    "long": ({}, [datum([1] * 65)], "datum 0.*65.*64"),
}


@pytest.mark.parametrize("case", BAD_PASSES)
async def test_a_bad_pass_is_accepted_takes_its_seq_id_and_fails(world: World, case: str) -> None:
    changes, data, message = BAD_PASSES[case]
    model = await world.model()
    answer = await post_pass(world, protobuf(model, 1, *data, **changes))
    assert answer.status_code == 200
    assert re.search(message, await world.failure(answer.json()["request_id"]))
    row = (await world.queued())[-1]
    assert (row.seq_id, row.status, row.body_bytes) == (1, FutureStatus.FAILED, 0)
    assert (await post_pass(world, protobuf(model, 1, *data, **changes))).json() == answer.json()
    assert (await post_pass(world, protobuf(model, 2))).status_code == 200


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"adam_params": {"learning_rate": -1.0}}, "learning_rate"),
        ({"adam_params": {"learning_rate": "fast"}}, "learning_rate"),
        ({"adam_params": {"momentum": 0.9}}, "momentum"),
        ({"adam_params": {"beta1": 2**64}}, "adam_params.beta1 is 18446744073709551616, expected a number"),
        ({"adam_params": {"momentum": 2**64}}, "momentum"),
        ({"adam_params": None}, "adam_params"),
        ({"adam_params": 3}, "adam_params"),
        ({"learning_rate": 0.1}, "body has the unknown key 'learning_rate', expected"),
        ({"optimizer_params": {"type": "dimuon", "learning_rate": 0.1}}, "both set"),
        ({"adam_params": None, "optimizer_params": {"type": "dimuon"}}, "optimizer_params.learning_rate"),
    ],
)
async def test_a_bad_step_is_accepted_and_fails(world: World, change: dict[str, Any], message: str) -> None:
    request = {**step(await world.model(), 1), **change}
    failure = await world.failure((await world.ok("optim_step", request))["request_id"])
    assert message in failure
    assert "the gradients accumulated for it are dropped" in failure


@pytest.mark.parametrize("forward_only", [False, True])
async def test_a_pass_with_unknown_fields_is_accepted_and_fails(world: World, forward_only: bool) -> None:
    model = await world.model()
    body = protobuf(model, 1, forward_only=forward_only) + b"\xf8\x07\x01"
    for _ in range(2):  # a repetition gets the same future
        answer = await post_pass(world, body)
        assert "the unknown field number 127 of ForwardBackwardRequest" in await world.failure(
            answer.json()["request_id"]
        )
    assert (await post_pass(world, protobuf(model, 2))).status_code == 200


async def test_json_with_an_unknown_key_is_accepted_and_fails(world: World) -> None:
    """A JSON pass has no forward_only: it would have trained."""
    accepted = await world.ok("forward_backward", {**old_json(await world.model(), 1), "forward_only": True})
    assert "body has the unknown key 'forward_only'" in await world.failure(accepted["request_id"])


async def test_a_step_of_an_old_sdk_needs_no_defaults_and_no_type(world: World) -> None:
    model = await world.model()
    await world.ok("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 0.1}})
    assert (await world.queued())[-1].status is FutureStatus.PENDING


@pytest.mark.parametrize(
    "path", ["optim_step", "save_weights", "save_weights_for_sampler", "forward_backward"]
)
@pytest.mark.parametrize("change", [{"seq_id": None}, {"seq_id": "1"}, {"seq_id": 0}, {"model_id": 7}])
async def test_without_model_id_or_seq_id_it_is_400_that_names_it(
    world: World, path: str, change: dict[str, Any]
) -> None:
    answer = await world.post(path, {**step(await world.model(), 1), **change})
    assert answer.status_code == 400
    assert int(answer.headers["content-length"]) > 0
    assert next(iter(change)) in answer.json()["detail"]


async def test_protobuf_that_is_none_is_400(world: World) -> None:
    answer = await post_pass(world, b"\xff\xff not protobuf")
    assert answer.status_code == 400
    assert int(answer.headers["content-length"]) > 0


async def test_an_unknown_model_is_404(world: World) -> None:
    assert (await world.post("optim_step", step("no:train:0", 1))).status_code == 404
    assert (await post_pass(world, protobuf("no:train:0", 1))).status_code == 404

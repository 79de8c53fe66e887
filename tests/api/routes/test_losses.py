"""Uploading a loss: a promise that is kept at once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tinker import types
from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss

from skyrl_tinker.domain.ids import SessionId
from skyrl_tinker.domain.values import CustomLoss
from skyrl_tinker.store import custom_losses
from tests.api.support.world import Json, World, new_home, running


def weighted(logprobs: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = -(logprobs * weights).clamp(max=float("inf"))[:, None].sum()
    return loss, {"custom/nll:sum": loss}


def upload(session: str, seq_id: int = 0, **changes: Any) -> Json:
    """The body that the SDK sends for `weighted`."""
    handle = trace_loss(weighted, {"logprobs": 1, "weights": 1}, session)
    request = types.CreateCustomLossRequest(
        session_id=session,
        custom_loss_seq_id=seq_id,
        name=handle.name,
        inputs=list(handle.inputs),
        graph=encode_graph(handle),
    )
    return request.model_dump(mode="json") | changes


async def stored(world: World, session: str, loss_id: str) -> CustomLoss | None:
    return await world.store.read(lambda conn: custom_losses.get(conn, SessionId(session), loss_id))


async def test_a_loss_is_kept_and_its_promise_with_it(world: World) -> None:
    session = await world.session()
    accepted = await world.ok("create_custom_loss", upload(session))
    answer = (await world.retrieve(accepted["request_id"])).json()
    assert answer["type"] == "create_custom_loss"
    loss = await stored(world, session, answer["loss_id"])
    assert loss is not None
    assert loss.inputs == (("logprobs", 1), ("weights", 1))
    assert await stored(world, await world.session(), answer["loss_id"]) is None


async def test_a_retry_gets_the_same_promise_and_another_loss_a_refusal(world: World) -> None:
    session = await world.session()
    first = await world.ok("create_custom_loss", upload(session))
    assert await world.ok("create_custom_loss", upload(session)) == first
    other = await world.post("create_custom_loss", upload(session, name="other"))
    assert other.status_code == 422
    assert "custom_loss_seq_id 0" in other.json()["detail"]


async def test_a_loss_that_is_not_allowed_fails_its_promise_by_name(world: World) -> None:
    body = upload(await world.session())
    node = next(node for node in body["graph"]["nodes"] if node["op"] == "call_method")
    node["target"] = "tolist"
    accepted = await world.ok("create_custom_loss", body)
    assert f"node '{node['name']}': call_method 'tolist'" in await world.failure(accepted["request_id"])
    assert await world.ok("create_custom_loss", body) == accepted


async def test_a_constant_that_would_become_a_float_fails_its_promise_by_name(world: World) -> None:
    body = upload(await world.session())
    node = next(node for node in body["graph"]["nodes"] if node["op"] == "call_method")
    node["args"].append(2**64)
    accepted = await world.ok("create_custom_loss", body)
    failure = await world.failure(accepted["request_id"])
    assert "found the argument 18446744073709551616, expected an integer of 64 bits" in failure


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"graph": {"format": 2, "nodes": []}}, 400, "graph.format"),
        ({"custom_loss_seq_id": "0"}, 400, "custom_loss_seq_id"),
        ({"session_id": "nobody"}, 404, "no session nobody"),
    ],
)
async def test_bodies_of_another_form_are_refused(
    world: World, changes: Json, status: int, message: str
) -> None:
    answer = await world.post("create_custom_loss", upload(await world.session()) | changes)
    assert answer.status_code == status
    assert message in answer.json()["detail"]


async def test_a_finished_session_takes_no_losses(world: World) -> None:
    session = await world.session()
    await world.ok(f"sessions/{session}/finish", {"reason": {"type": "success"}})
    assert (await world.post("create_custom_loss", upload(session))).status_code == 410


async def test_the_engine_gets_nothing_to_do(world: World) -> None:
    await world.ok("create_custom_loss", upload(await world.session()))
    assert await world.queued() == []


async def test_the_setting_decides_where_custom_losses_run(world: World, tmp_path: Path) -> None:
    assert (await world.ok("client/config", {}))["custom_loss_server_side"] is True
    async with running(new_home(tmp_path / "other", sdk={"custom_loss_server_side": False})) as other:
        assert (await other.ok("client/config", {}))["custom_loss_server_side"] is False
        answer = await other.post("create_custom_loss", upload(await other.session()))
        assert answer.status_code == 400
        assert "sdk.custom_loss_server_side" in answer.json()["detail"]

"""Uploaded losses: kept once, answered at once, of one session only."""

import asyncio

import pytest

from skyrl_tinker.domain.ids import FutureStatus, SessionId
from skyrl_tinker.domain.values import CustomLoss, Failure
from skyrl_tinker.errors import GoneError, NotFoundError, SeqIdReusedError, UserError
from skyrl_tinker.store import custom_losses
from skyrl_tinker.store.custom_losses import NewLoss
from skyrl_tinker.store.futures import finish, record, training_submission
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.store import Store
from tests.store.support.rows import finish_session, new_session, outcome, queued
from tests.support.reads import reading

LOSS = CustomLoss(
    "f", (("logprobs", 1), ("w", 0)), ({"op": "output", "args": [{"float": "inf"}, None, 1.5]},)
)
REFUSED = Failure("node 'x': call_function 'os.system' is not allowed", "user")


async def upload(
    store: Store,
    session: SessionId,
    seq_id: int = 0,
    loss: CustomLoss | None = LOSS,
    digest: bytes = b"digest",
) -> record.Accepted:
    new = NewLoss(session, seq_id, loss or REFUSED, digest)
    return await store.write(lambda conn: training_submission.submit_custom_loss(conn, new, None, b"{}"))


async def found(store: Store, session: SessionId, seq_id: int = 0) -> CustomLoss | None:
    return await store.read(lambda conn: custom_losses.get(conn, session, f"{session}:loss:{seq_id}"))


async def test_a_loss_comes_back_as_it_was(store: Store, session: SessionId) -> None:
    accepted = await upload(store, session)
    assert await found(store, session) == LOSS
    answer = await outcome(store, accepted.request_id)
    assert (answer.status, answer.content_type, answer.body) == (FutureStatus.DONE, "application/json", b"{}")


async def test_other_sessions_cannot_have_it(store: Store, session: SessionId) -> None:
    await upload(store, session)
    other = await new_session(store)
    with reading(store) as conn:
        assert custom_losses.get(conn, other, f"{session}:loss:0") is None
        assert custom_losses.get(conn, session, "nobody") is None


async def test_retries_that_race_get_one_promise(store: Store, session: SessionId) -> None:
    answers = await asyncio.gather(*(upload(store, session) for _ in range(20)))
    assert len({accepted.request_id for accepted in answers}) == 1
    assert sum(accepted.created for accepted in answers) == 1


async def test_another_loss_under_the_same_number_is_refused(store: Store, session: SessionId) -> None:
    await upload(store, session, 3)
    with pytest.raises(
        SeqIdReusedError, match=f"custom_loss_seq_id 3 of session {session} .*another payload"
    ):
        await upload(store, session, 3, digest=b"other")


async def test_a_refused_loss_keeps_its_number_and_its_failure(store: Store, session: SessionId) -> None:
    accepted = await upload(store, session, loss=None)
    again = await upload(store, session, loss=None)
    assert again.request_id == accepted.request_id
    answer = await outcome(store, accepted.request_id)
    assert answer.status is FutureStatus.FAILED
    assert answer.body == finish.failure_body(REFUSED)
    assert await found(store, session) is None


async def test_the_engine_never_sees_them(store: Store, session: SessionId, model: ModelRow) -> None:
    before = await queued(store)
    await upload(store, session)
    await upload(store, session, 1, None)
    assert await queued(store) == before


async def test_sessions_must_be_there_and_live(store: Store, session: SessionId) -> None:
    with pytest.raises(NotFoundError, match="no session nobody"):
        await upload(store, SessionId("nobody"))
    first = await upload(store, session)
    await finish_session(store, session)
    with pytest.raises(GoneError):
        await upload(store, session, 1)
    assert (await upload(store, session)).request_id == first.request_id


async def test_a_session_has_room_for_so_many(
    store: Store, session: SessionId, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(custom_losses, "MAX_PER_SESSION", 3)
    first = await upload(store, session, 0)
    await upload(store, session, 1, None)
    await upload(store, session, 2)
    with pytest.raises(UserError, match="3 custom losses, the limit"):
        await upload(store, session, 3)
    assert (await upload(store, session, 0)).request_id == first.request_id
    await upload(store, await new_session(store), 0)

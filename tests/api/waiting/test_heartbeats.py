"""Heartbeats that are written together, and what each client is told."""

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest
from sqlalchemy.exc import OperationalError

from skyrl_tinker.api.waiting import heartbeats
from skyrl_tinker.api.waiting.heartbeats import Heartbeats
from skyrl_tinker.domain.ids import SessionId
from skyrl_tinker.errors import NotFoundError
from skyrl_tinker.store import session_records
from skyrl_tinker.store.store import Store
from tests.engine.support import journal
from tests.support.waiting import end


async def test_a_write_that_fails_is_the_answer_to_each_and_later_ones_are_written(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "TOGETHER_S", 0.0)
    sessions = [await journal.new_session(store) for _ in range(3)]
    writing = Heartbeats(store)
    running = asyncio.create_task(writing.run())

    async def answers(*asked: SessionId) -> list[Any]:
        keeping = [writing.keep(None, session) for session in asked]
        return await asyncio.gather(*keeping, return_exceptions=True)

    fails = Mock(side_effect=OperationalError("UPDATE", {}, Exception("disk I/O error")))
    with monkeypatch.context() as broken:
        broken.setattr(session_records, "heartbeat", fails)
        assert [type(each) for each in await answers(*sessions)] == [OperationalError] * 3
    *kept, unknown = await answers(*sessions, SessionId("unknown"))
    assert kept == [None] * 3
    assert isinstance(unknown, NotFoundError)
    await end(running)


async def test_heartbeats_that_come_together_are_one_write(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "TOGETHER_S", 0.0)
    sessions = [await journal.new_session(store) for _ in range(20)]
    writing, write = Heartbeats(store), Mock(wraps=session_records.heartbeat)
    monkeypatch.setattr(session_records, "heartbeat", write)
    keeping = [asyncio.create_task(writing.keep(None, session)) for session in sessions]
    running = asyncio.create_task(writing.run())
    await asyncio.gather(*keeping)
    assert [len(call.kwargs["beats"]) for call in write.call_args_list] == [20]
    await end(running)

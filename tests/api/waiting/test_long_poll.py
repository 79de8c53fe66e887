"""One reader wakes all who wait, however much has finished at once."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import Connection

from skyrl_tinker.api.waiting import long_poll
from skyrl_tinker.api.waiting.long_poll import FutureWaiter
from skyrl_tinker.config import Settings
from skyrl_tinker.domain.ids import FutureStatus
from skyrl_tinker.store.doorbell import SocketBell
from skyrl_tinker.store.futures import finish, outcomes
from skyrl_tinker.store.store import Store
from tests.store.support.rows import base_sampler, new_session, sample


async def test_more_results_than_are_read_at_once_reach_all_who_wait(settings: Settings) -> None:
    store, bell = Store.open(settings.store_url), SocketBell.bind(settings.root, "api")
    waiter = FutureWaiter(store, bell)
    await waiter.start()
    sampler = await base_sampler(store, await new_session(store))
    count = 3 * long_poll._PAGE
    ids = [(await sample(store, sampler, number)).request_id for number in range(count)]
    waits = [asyncio.create_task(waiter.wait(request_id, None, 60.0)) for request_id in ids]
    while waiter.waiting < count:  # noqa: ASYNC110 (tasks register one by one)
        await asyncio.sleep(0)
    bodies = {request_id: str(number).encode() for number, request_id in enumerate(ids)}
    bodies[ids[1]] = bytes(2 * long_poll._SMALL_BYTES)
    bodies[ids[2]] = bytes(long_poll._SMALL_BYTES)

    def end_all(conn: Connection) -> None:
        for outcome in outcomes.find_many(conn, ids):
            finish.succeed(conn, outcome.future_id, "t", bodies[outcome.request_id])

    await store.write(end_all)
    await waiter.announce()
    found = [outcome for outcome in await asyncio.gather(*waits) if outcome is not None]
    assert [(each.request_id, each.status, each.body) for each in found] == [
        (request_id, FutureStatus.DONE, body) for request_id, body in bodies.items()
    ]
    bell.close()
    await store.close()


async def test_long_results_for_which_nobody_waits_here_are_not_read(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, bell = Store.open(settings.store_url), SocketBell.bind(settings.root, "api")
    waiters = [FutureWaiter(store, bell), FutureWaiter(store, bell)]  # of two processes
    for waiter in waiters:
        await waiter.start()
    sampler = await base_sampler(store, await new_session(store))
    ids = [(await sample(store, sampler, number)).request_id for number in range(2)]
    waits = [asyncio.create_task(each.wait(ids[n], None, 60.0)) for n, each in enumerate(waiters)]
    while not all(waiter.waiting for waiter in waiters):  # noqa: ASYNC110 (tasks register one by one)
        await asyncio.sleep(0)
    body = bytes(long_poll._BESIDE_BYTES + 1)

    def end_all(conn: Connection) -> None:
        for outcome in outcomes.find_many(conn, ids):
            finish.succeed(conn, outcome.future_id, "t", body)

    await store.write(end_all)
    read: list[outcomes.Outcome | None] = []
    announced, found = outcomes.finished_after, outcomes.find

    def counted_announced(*arguments: Any) -> Any:
        results = announced(*arguments)
        read.extend(outcome for _, outcome in results)
        return results

    def counted_found(*arguments: Any) -> Any:
        read.append(found(*arguments))
        return read[-1]

    monkeypatch.setattr(outcomes, "finished_after", counted_announced)
    monkeypatch.setattr(outcomes, "find", counted_found)
    for waiter in waiters:
        await waiter.announce()
    answers = await asyncio.gather(*waits)
    assert [each and each.body for each in answers] == [body, body]
    assert sum(len(each.body or b"") for each in read if each) == 2 * len(body)
    bell.close()
    await store.close()

"""Whatever a network does to requests, the server runs the history of the plain sequence, once.

Any order of arrival, any duplication, any lost response, at two API processes which end and start again in
between: the engine does to each model what it does when each request comes once and in turn; every arrival
gets the first one's ids; and where a request never comes, it blocks its own model and no other.

`scripts/proofs histories` tries some thousands of plans.
"""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given, settings

from skyrl_tinker.domain.ids import FutureStatus, ModelId, RequestId
from skyrl_tinker.store import model_records
from skyrl_tinker.store.futures import outcomes as future_outcomes
from tests.api.support.clients import Clients, Key
from tests.api.support.plans import APIS, SESSIONS, Event, Plan, computed, drawn, plain, plans, rounds
from tests.api.support.whole import Whole, whole
from tests.api.support.world import PROTOBUF, new_home
from tests.support.reads import reading
from tests.support.scripted_trainer import Ran
from tests.support.waiting import end, until

LONG = settings.get_current_profile_name() == "long"
FEW = settings(max_examples=10)
PENDING = "pending"


@dataclass
class History:
    """Result of a plan, without what differs from run to run."""

    ran: dict[int, list[Ran]] = field(default_factory=dict)  # by lane
    drawn: list[tuple[int, ...]] = field(default_factory=list)
    outcomes: dict[Key, Any] = field(default_factory=dict)


class Runs:
    """One server for all examples, each of which has sessions of its own."""

    def __init__(self, home: Path) -> None:
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self._settings = new_home(home)
        self._runner.run(self._open())

    async def _open(self) -> None:
        self._server: Whole = await self._stack.enter_async_context(whole(self._settings, APIS))
        api = self._server.apis[0]
        model = await api.model()
        saved = await api.ok("save_weights", {"model_id": model, "seq_id": 1, "path": "start"})
        await self._finished([saved["request_id"]])
        self._checkpoint = f"tinker://{model}/weights/start"

    def close(self) -> None:
        with self._runner:
            self._runner.run(self._stack.aclose())

    def history(self, plan: Plan) -> History:
        return self._runner.run(self._history(plan))

    async def _history(self, plan: Plan) -> History:
        sessions = [await self._server.apis[0].session() for _ in range(SESSIONS)]
        clients = Clients(plan, sessions, self._checkpoint)
        before = len(self._server.engine.samplers.drawn)
        for number, events in enumerate(rounds(plan)):
            await asyncio.gather(*(self._arrive(clients, event) for event in events))
            for api in (api for at, api in plan.restarts if at == number):
                await self._server.restart_api(api)
        found = await self._come_of(clients)
        assert {answer.status_code for answer in clients.refusals} <= {400, 422}
        found.drawn = sorted(self._server.engine.samplers.drawn[before:])
        return found

    async def _arrive(self, clients: Clients, event: Event) -> None:
        sending = asyncio.create_task(clients.send(self._server.apis[event.arrival.api], event))
        if event.arrival.cut is not None:
            for _ in range(event.arrival.cut):
                await asyncio.sleep(0)
            await end(sending)
        elif event.intrudes:
            clients.refusals.append(await sending)
        else:
            clients.answers[event.lane, event.place].append(await sending)

    async def _come_of(self, clients: Clients) -> History:
        found = History()
        requests = {key: _one(answers) for key, answers in clients.answers.items()}
        await self._finished([each for key, each in requests.items() if each and _runs(clients.plan, key)])
        for key, request in requests.items():
            found.outcomes[key] = await self._outcome(clients, key, request)
        for number, lane in enumerate(clients.plan.lanes):
            if lane.kind == "model":
                found.ran[number] = await self._ran(clients.model_id(number))
        return found

    async def _finished(self, requests: list[str]) -> None:
        async def all_have() -> bool:
            return all([await self._status(each) for each in requests])

        await until(all_have)

    async def _status(self, request: str) -> bool:
        with reading(self._server.engine.store) as conn:
            found = future_outcomes.find(conn, RequestId(request))
        assert found is not None
        return found.status is not FutureStatus.PENDING

    async def _outcome(self, clients: Clients, key: Key, request: str | None) -> Any:
        if request is None:
            return "refused"
        if not await self._status(request):
            return PENDING
        answer = await self._server.apis[0].retrieve(request, **PROTOBUF)
        assert answer.status_code == 200
        if answer.headers["content-type"] == PROTOBUF["Accept"]:
            return answer.content
        value = orjson.loads(clients.label(answer.text))
        if clients.kind(key) == "named":  # while the first is being published the message says so
            value.pop("error", None)
        if target := value.pop("sampling_session_id", None):
            assert int(target.rpartition(":")[2]) in clients.targets[key]
        value.pop("loss_id", None)
        return value

    async def _ran(self, model_id: str) -> list[Ran]:
        """Everything so far; then the model is let go, as at the end of its session."""
        with reading(self._server.engine.store) as conn:
            model = model_records.by_id(conn, ModelId(model_id))
        assert model is not None
        self._server.engine.driver.requests.release(model.key)
        return self._server.engine.trainer.ran.pop(model.key, [])


def _one(answers: list[httpx.Response]) -> str | None:
    """The request_id that all arrivals were given; None if it is not one that waits for a result."""
    assert len({(answer.status_code, answer.content) for answer in answers}) == 1, "each was told the same"
    assert answers[0].status_code in (200, 400), answers[0].text
    request: str | None = answers[0].json().get("request_id")
    return request


def _runs(plan: Plan, key: Key) -> bool:
    """True unless a request that never comes precedes it; a refused request has ended in any case."""
    number, place = key
    return place is None or place < plan.lanes[number].missing


def _computing(ran: Ran) -> tuple[str, int | None] | None:
    """Return the work with its seq_id, where it shows one."""
    what, value = ran
    if what == "pass":
        return what, value[0]
    return (what, value) if what in ("step", "zero") else None


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    made = Runs(tmp_path_factory.mktemp("histories"))
    yield made
    made.close()


@given(plan=plans)
@(settings() if LONG else FEW)
def test_any_arrival_gives_the_history_of_the_plain_sequence(runs: Runs, plan: Plan) -> None:
    found, expected = runs.history(plan), runs.history(plain(plan))
    for number, ran in expected.ran.items():
        assert found.ran[number] == ran
        assert [what for what in map(_computing, ran) if what] == computed(plan.lanes[number])
    assert expected.drawn == drawn(plan)
    assert found.drawn == expected.drawn
    assert found.outcomes == expected.outcomes

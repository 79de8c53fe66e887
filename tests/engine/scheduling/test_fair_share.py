"""Tenants that share a trainer, on a simulated clock: what each gets of its time, and how long it waits."""

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from skyrl_tinker.domain.ids import ModelKey, OwnerId, RequestKind
from skyrl_tinker.engine.scheduling.lanes import Lanes
from skyrl_tinker.engine.scheduling.planner import Pass, PassBudget, Planner, Unit
from skyrl_tinker.engine.scheduling.row_work import PASSES, cost
from skyrl_tinker.store.futures.queue import QueuedRow
from tests.engine.support.rows import queued
from tests.engine.support.simulation import now, simulated

BUDGET, UNIT_S = 1000, 1.0
DEPTH = 40  # requests of a model that a flood has sent: four units full at least
FORWARD, FB, STEP = RequestKind.FORWARD, RequestKind.FORWARD_BACKWARD, RequestKind.OPTIM_STEP
SAVE, SYNC = RequestKind.SAVE_WEIGHTS, RequestKind.SAVE_WEIGHTS_FOR_SAMPLER
KINDS = (FB, FORWARD, STEP, SYNC, SAVE)
MIXES = {
    "passes": (FB,),
    "saves": (SAVE,),
    "passes, steps and saves": (FB, FB, STEP, FORWARD, SYNC, FB, STEP, SAVE),
}


def seconds(row: QueuedRow) -> float:
    return UNIT_S * (cost(row) / BUDGET if row.kind in PASSES else 0.25)


@dataclass
class Engine:
    """Workers that are planned for as the trainer driver does, with a look ahead during each unit."""

    lanes: Lanes = field(default_factory=Lanes)
    begun: list[Unit] = field(default_factory=list)
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    places: "dict[ModelKey, itertools.count[int]]" = field(default_factory=dict)
    answers: "dict[int, asyncio.Future[int]]" = field(default_factory=dict)
    used: Counter[str] = field(default_factory=Counter)  # seconds by session

    def send(
        self, session: str, model: ModelKey, kind: RequestKind, tokens: int = 10, owner: OwnerId | None = None
    ) -> "asyncio.Future[int]":
        """Its answer is the number of units that had begun before its own one."""
        if not self.lanes.knows(model):
            self.lanes.open(model)
            self.places[model] = itertools.count()
        number, place = next(self.numbers), next(self.places[model])
        row = queued(number, model, place, kind, tokens=tokens, session=session, owner=owner)
        self.lanes.add(row)
        self.answers[number] = asyncio.get_running_loop().create_future()
        self.woken.set()
        return self.answers[number]

    async def run(self) -> None:
        budget = PassBudget(BUDGET, UNIT_S)
        planner = Planner(self.lanes, budget, lambda works: UNIT_S / 10 * len([*works]), now)
        ahead: Pass | None = None
        while True:
            unit = planner.pop(ahead.rows if ahead else ())
            if unit is None:
                self.woken.clear()
                await self.woken.wait()
                continue
            self.begun.append(unit)
            ahead = planner.full_pass_ahead() if isinstance(unit, Pass) else None
            await asyncio.sleep(sum(map(seconds, unit.rows)))
            planner.charge((row, seconds(row)) for row in unit.rows)
            for row in unit.rows:
                self.used[row.session_id] += seconds(row)
                self.answers.pop(row.id).set_result(len(self.begun) - 1)


@asynccontextmanager
async def running(*floods: Any) -> AsyncIterator[Engine]:
    """An engine beside these floods: functions of the engine."""
    engine = Engine()
    async with asyncio.TaskGroup() as tasks:
        others = [tasks.create_task(each(engine)) for each in floods]
        others.append(tasks.create_task(engine.run()))
        yield engine
        for task in others:
            task.cancel()


def flood(
    models: int,
    mix: tuple[RequestKind, ...] = (FB,),
    session: str = "flood",
    owner: OwnerId | None = None,
    tokens: int = BUDGET // 10,
    depth: int = DEPTH,
) -> Any:
    """Every model always has some requests waiting."""

    async def send(engine: Engine) -> None:
        kinds = itertools.cycle(mix)
        lanes = {
            ModelKey(crc32(f"{session} {number}".encode())): deque[asyncio.Future[int]]()
            for number in range(models)
        }
        while True:
            for model, sent in lanes.items():
                while sent and sent[0].done():
                    sent.popleft()
                while len(sent) < depth:
                    sent.append(engine.send(session, model, next(kinds), tokens, owner))
            await asyncio.sleep(UNIT_S / 4)

    return send


def _combinations() -> Iterator[Any]:
    """Yield all; of those that are not long each pair of values is in one."""
    values = ((1, 50), tuple(MIXES), KINDS, (10, BUDGET))
    for places in itertools.product(*(range(len(each)) for each in values)):
        marks = pytest.mark.long if sum(places) % 2 else ()
        yield pytest.param(*(each[place] for each, place in zip(values, places, strict=True)), marks=marks)


@pytest.mark.parametrize(("models", "mix", "kind", "tokens"), [*_combinations()])
@simulated
async def test_one_request_runs_right_after_the_unit_that_runs_when_it_comes(
    models: int, mix: str, kind: RequestKind, tokens: int
) -> None:
    """Also when the next unit was prepared by then."""
    async with running(flood(models, MIXES[mix])) as engine:
        for number in range(5):
            await asyncio.sleep(7.3 * UNIT_S)
            current = len(engine.begun) - 1
            assert await engine.send("small", ModelKey(number), kind, tokens) - current <= 1
        assert now() > 35 * UNIT_S


@pytest.mark.parametrize("sessions", [1, 8])
@pytest.mark.parametrize("depth", [2, DEPTH])
@simulated
async def test_a_quiet_tenant_waits_for_one_unit_per_request_beside_many_floods(
    sessions: int, depth: int
) -> None:
    """It sends when it is answered, and pauses as for a sample. It uses more than a ninth of the time."""
    floods = [flood(2, (FB, FB, STEP), session=f"flood {number}", depth=depth) for number in range(sessions)]
    async with running(*floods) as engine:
        await asyncio.sleep(20 * UNIT_S)
        for _ in range(30):
            for kind in (FB, STEP):
                current = len(engine.begun) - 1
                assert await engine.send("quiet", ModelKey(1), kind, 200) - current <= 1
                await asyncio.sleep(UNIT_S / 20)
            await asyncio.sleep(UNIT_S)


@simulated
async def test_who_always_comes_back_leaves_the_flood_its_half_of_the_time() -> None:
    """Answered, it asks again at once: no newcomer's place is worth more than a share."""
    async with running(flood(5)) as engine:
        for _ in range(100):
            await engine.send("back again", ModelKey(1), SAVE)
        assert engine.used["flood"] >= engine.used["back again"] - UNIT_S


@simulated
async def test_large_requests_get_no_more_than_small_ones() -> None:
    """Two floods, one of requests that fill a unit and one of tiny ones, have the same time."""
    large = flood(1, session="large", tokens=BUDGET)
    small = flood(10, session="small", tokens=10)
    async with running(large, small) as engine:
        await asyncio.sleep(100 * UNIT_S)
        assert engine.used["small"] == pytest.approx(engine.used["large"], abs=2 * UNIT_S)


@simulated
async def test_ten_sessions_of_one_owner_get_as_much_as_one_of_another() -> None:
    many = [flood(1, session=f"many {number}", owner=OwnerId(1)) for number in range(10)]
    async with running(*many, flood(1, session="one", owner=OwnerId(2))) as engine:
        await asyncio.sleep(100 * UNIT_S)
        shares = [used for session, used in engine.used.items() if session != "one"]
        assert sum(shares) == pytest.approx(engine.used["one"], abs=2 * UNIT_S)
        assert max(shares) - min(shares) <= UNIT_S


@pytest.mark.parametrize("tokens", [10, 100, 300])
@simulated
async def test_passes_that_join_those_of_others_keep_no_sibling_from_its_turn(tokens: int) -> None:
    """An owner's saves need a unit of their own, while its passes ride along in those of another one."""
    saves = flood(1, (SAVE,), "saves", OwnerId(1))
    passes = flood(1, (FB,), "passes", OwnerId(1), tokens)
    async with running(saves, passes, flood(1, (FB,), "other", OwnerId(2), 70)) as engine:
        await asyncio.sleep(40 * UNIT_S)
        assert engine.used["saves"] == pytest.approx(10 * UNIT_S, abs=2 * UNIT_S)


tenants = st.lists(
    st.tuples(
        st.integers(1, 3),
        st.integers(1, 3),
        st.sampled_from([10, 70, 100, 300, BUDGET]),
        st.sampled_from(sorted(MIXES)),
    ),
    min_size=2,
    max_size=6,
)


@given(tenants)
@settings(max_examples=10, phases=[Phase.generate])
@simulated
async def test_whoever_always_has_work_gets_the_same_time(drawn: Sequence[tuple[int, int, int, str]]) -> None:
    """Owners among each other, and sessions of an owner, whatever they send and with however many models."""
    floods = [
        flood(models, MIXES[mix], f"{owner}-{number}", OwnerId(owner), tokens)
        for number, (owner, models, tokens, mix) in enumerate(drawn)
    ]
    async with running(*floods) as engine:
        await asyncio.sleep(100 * UNIT_S)
        owners: dict[str, list[float]] = {}
        for session, used in engine.used.items():
            owners.setdefault(session.partition("-")[0], []).append(used)
        for sessions in owners.values():
            assert max(sessions) - min(sessions) <= 6 * UNIT_S
        totals = [sum(sessions) for sessions in owners.values()]
        assert max(totals) - min(totals) <= 6 * UNIT_S
        assert sum(totals) >= 95 * UNIT_S, "the trainer was idle"

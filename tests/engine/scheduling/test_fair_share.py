"""A tenant with one request behind the flood of another, on a simulated clock: its wait, counted in units."""

import asyncio
import itertools
from dataclasses import dataclass, field

import pytest

from skyrl_tinker.domain.ids import ModelKey, RequestKind
from skyrl_tinker.engine.scheduling.lanes import Lanes
from skyrl_tinker.engine.scheduling.planner import Pass, Planner, Unit
from tests.engine.support.rows import queued
from tests.engine.support.simulation import now, simulate

BUDGET, UNIT_S = 1000, 1.0
FORWARD, FB, STEP = RequestKind.FORWARD, RequestKind.FORWARD_BACKWARD, RequestKind.OPTIM_STEP
SAVE, SYNC = RequestKind.SAVE_WEIGHTS, RequestKind.SAVE_WEIGHTS_FOR_SAMPLER
MIXES = {
    "passes": (FB,),
    "saves": (SAVE,),
    "passes, steps and saves": (FB, FB, STEP, FORWARD, SYNC, FB, STEP, SAVE),
}


@dataclass
class Engine:
    """Workers that take a second for each unit, planned for as the trainer driver does: one pass ahead."""

    lanes: Lanes = field(default_factory=Lanes)
    begun: list[Unit] = field(default_factory=list)
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    places: "dict[ModelKey, itertools.count[int]]" = field(default_factory=dict)
    answers: "dict[int, asyncio.Future[int]]" = field(default_factory=dict)

    def send(
        self, session: str, model: ModelKey, kind: RequestKind, tokens: int = 10
    ) -> "asyncio.Future[int]":
        """Its answer is the number of units that had begun before its own one."""
        if not self.lanes.knows(model):
            self.lanes.open(model)
            self.places[model] = itertools.count()
        number, place = next(self.numbers), next(self.places[model])
        self.lanes.add(queued(number, model, place, kind, tokens=tokens, session=session))
        self.answers[number] = asyncio.get_running_loop().create_future()
        self.woken.set()
        return self.answers[number]

    async def run(self) -> None:
        planner, ahead = Planner(self.lanes, BUDGET), None
        while True:
            unit = ahead or planner.pop()
            if unit is None:
                self.woken.clear()
                await self.woken.wait()
                continue
            self.begun.append(unit)
            ahead = planner.pop_full_pass() if isinstance(unit, Pass) else None
            await asyncio.sleep(UNIT_S)
            for row in unit.rows:
                self.answers.pop(row.id).set_result(len(self.begun) - 1)


async def flood(engine: Engine, models: int, mix: tuple[RequestKind, ...]) -> None:
    """Every model always has some requests waiting, of which ten fill a unit."""
    kinds = itertools.cycle(mix)
    while True:
        for number in range(models):
            engine.send("flood", ModelKey(1000 + number), next(kinds), tokens=BUDGET // 10)
        await asyncio.sleep(UNIT_S / 4)


@pytest.mark.parametrize("models", [1, 50])
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("kind", [FB, FORWARD, STEP, SYNC, SAVE])
@pytest.mark.parametrize("tokens", [10, BUDGET, 5 * BUDGET])
def test_one_request_waits_at_most_two_units_behind_a_flood(
    models: int, mix: tuple[RequestKind, ...], kind: RequestKind, tokens: int
) -> None:
    """They are the one that runs when it comes and the one that is prepared by then."""

    async def story() -> None:
        engine = Engine()
        async with asyncio.TaskGroup() as tasks:
            others = [tasks.create_task(flood(engine, models, mix)), tasks.create_task(engine.run())]
            for number in range(5):
                await asyncio.sleep(7.3 * UNIT_S)
                running = len(engine.begun) - 1
                own = await engine.send("small", ModelKey(number), kind, tokens)
                assert own - running <= 2
            assert now() > 35 * UNIT_S
            for task in others:
                task.cancel()

    simulate(story())


def test_a_tenant_that_always_comes_back_leaves_the_flood_its_half() -> None:
    """Answered, it asks again at once: no newcomer's place is worth more than every second unit."""

    async def story() -> None:
        engine = Engine()
        async with asyncio.TaskGroup() as tasks:
            others = [tasks.create_task(flood(engine, 5, (FB,))), tasks.create_task(engine.run())]
            for _ in range(50):
                await engine.send("back again", ModelKey(1), SAVE)
            flooded = sum(isinstance(unit, Pass) for unit in engine.begun)
            assert flooded >= 49
            for task in others:
                task.cancel()

    simulate(story())

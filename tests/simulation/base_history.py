"""Short histories of a base model that always runs, and others that start and stop on demand.

The engine dies at any point of these starts and ends, and starts fail, once or again and again. In half of
them there are two on demand, mostly with room for one.
"""

import asyncio
from random import Random

from tests.simulation.faults import CHANGING, OF_RESTS, Faults
from tests.simulation.history import History

MOST_REQUESTS, MOST_FAULTS = 4, 2
PAUSES_S = (0.0, 0.0, 2.0, 6.0)
OF_BASES = (
    *5 * (CHANGING,),
    *OF_RESTS,
    "engine: at some moment",
    "api: at some moment",
    "the ranks die",
    "the ranks die after a call",
    "a sampler dies",
    "the machine starts again",
)


class BaseHistory(History):
    _most_requests = MOST_REQUESTS
    _pauses_s = PAUSES_S
    _exports = False

    def _choose(self, seed: int) -> None:
        self._trained, self._resting = Random(f"trained of {seed}"), Random(f"resting of {seed}")
        self._teaching = Random(f"teaching of {seed}") if seed % 2 else None
        self._crowds = seed % 8 in (1, 3, 5)
        self._failing = Random(f"failing of {seed}") if seed % 3 == 0 else None

    def _plan(self, seed: int) -> Faults:
        faults = Faults(self._random, 0, 2, disks=False)
        faults.add(self._random, MOST_FAULTS, OF_BASES)
        if self._failing:
            faults.fail_starts(self._failing)
        return faults

    async def _tell(self) -> None:
        teaching = asyncio.create_task(self._teacher.live()) if self._teacher else None
        models = await asyncio.gather(*(self._model(facts.name) for facts in self._bases))
        if teaching:
            await teaching
        await self._start_well()
        truths = [self._truth(model) for model in models]
        self.faults.end()
        for model, truth in zip(models, truths, strict=True):
            await self._check_state(model, truth)

"""What goes wrong in a history, and the points of the server's own code at which it does."""

import asyncio
import errno
import os
import re
from collections import Counter
from collections.abc import Sequence
from contextvars import Context
from random import Random

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.engine.trainer.model_returns import TRIES, WAKES
from tests.simulation.virtual_loop import PROCESS, Crash, VirtualLoop

FULL_S = 8.0
"""Most time that a disk is full."""
IN_DOUBT = "the answer to a commit of an API is lost"
COMPARED = "a probe is compared"
UNREAD, AWAY, TAKE_OVER = "files cannot be read", "the storage is away", "another server takes over"
LASTING_S, LONG_S = {UNREAD: 12.0, AWAY: 20.0}, 300.0
"""Most time that these last, and in some histories one of them."""
FOR_MINUTES = {each: f"{each} for minutes" for each in LASTING_S}
CRASHES = (
    "before a commit",
    "after a commit",
    "before an fsync",
    "before a rename",
    "after a rename",
    "before a link",
    "before a removal",
    "after a removal",
)
DISKS = ("a snapshot cannot be read", "the directories have another path")
"""In an eighth of the histories, beside others."""
OFTEN = (
    *(f"engine: {point}" for point in CRASHES),
    "engine: before a call of the ranks",
    "engine: after a call of the ranks",
    "engine: before a call of a sampler",
    "engine: after a call of a sampler",
    "api: before a commit",
    "api: after a commit",
    "api: before an answer",
    "engine: at some moment",
    "api: at some moment",
    "the ranks die",
    "the ranks die after a call",
    "the ranks die while files are written",
    "the ranks stand still",
    "a sampler dies",
    "the machine starts again",
    "the disk is full",
    "a request is lost",
    "an answer is lost",
    "a request comes twice",
    "a ring is lost",
)
OF_SAVES = ("engine: before a commit", "engine: after a commit", "engine: after a rename", *3 * (IN_DOUBT,))
"""Faults while saves are deleted of which nobody knows yet whether they are there."""
RARE = (UNREAD, TAKE_OVER, *2 * ("the machine starts again",))
"""Of more faults, which two histories in seven have, drawn from a stream of their own."""
POINTS = (*OFTEN, *DISKS, UNREAD, TAKE_OVER, IN_DOUBT, COMPARED, *FOR_MINUTES.values())
"""`engine: …` and `api: …`: that process dies there. COMPARED is no fault, but must come about, too."""
OF_STORAGE = ("engine: before a call of storage", "engine: after a call of storage", AWAY)
"""Those that come in histories with object storage only."""
OF_SYNCS = (
    *(f"engine: {when} a call of a {end}" for when in ("before", "after") for end in ("sync", "sender")),
    "the ranks die in a sync",
    *2 * ("a sampler dies in a sync", "a sampler dies after a call of a sync"),
    *2 * ("an end of a sync is lost", "the answer to an end of a sync is lost"),
)
"""Those that come in histories with full parameters only."""
OF_RESTS = tuple(f"engine: {when} {what}" for when in ("before", "after") for what in ("a start", "an end"))
"""Those that come in histories with a base model on demand only."""
CHANGING, CHANGES = "engine: in a start or an end", 60
"""Death at any point of a start, to the return of its models, or of an end; about how many there are."""
LOST = "the ranks are lost"
OF_STARTS = ("a start fails", "a check fails", "weights are not here yet", LOST)
"""Those of a further base model, also one that always runs; most are tried again, see `fail_starts`."""
AGAIN = (1, 2, 3, 6)
"""How often in a row a start fails, to choose from."""
ANYWHERE, PASSED = frozenset({"the machine starts again", "the disk is full", *RARE}), 200
"""Faults that may come at every point of the engine and the API, and how many a history passes about."""
DEATHS_OF_RANKS = frozenset(
    point for point in (*POINTS, *OF_SYNCS, *OF_STARTS) if point.startswith("the ranks")
)


class Faults:
    """Plan of a history: which points are faults at which of their passages. `hit`: those that came about.

    `in_returns`: by what brings models back, and model, how often in a row the ranks died while it did.
    """

    def __init__(
        self, seed: Random, most: int, deaths: int, points: Sequence[str] = OFTEN, *, disks: bool
    ) -> None:
        """`deaths`: of the ranks, at most; the server lets a unit kill them four times, then gives it up."""
        self.random = seed
        self._deaths = deaths
        self.hit: Counter[str] = Counter()
        self.in_returns: Counter[tuple[object, ModelKey]] = Counter()
        self.ended = False
        self.disk_full_until = 0.0
        self.lasts_until: dict[str, float] = {}
        self.lasting_s = dict(LASTING_S)
        self._left: dict[str, list[int]] = {}
        for _ in range(seed.randint(0, most)):
            self._plan(seed.choice(points), seed)
        if disks:
            self._left["a snapshot cannot be read"] = [1] * seed.randint(1, TRIES - 1)
            self._left["the directories have another path"] = [seed.randint(1, 3)]
            self._left.setdefault("engine: after a call of the ranks", []).append(seed.randint(3, 30))

    def add(self, seed: Random, most: int, points: Sequence[str]) -> None:
        """Plan some of these as well; a snapshot is tried TRIES times only."""
        points = [each for each in points if each != UNREAD or DISKS[0] not in self._left]
        for _ in range(seed.randint(1, most)):
            self._plan(seed.choice(points), seed)

    def prolong(self, point: str, seed: Random) -> None:
        """Have something fail for minutes, from a call of the ranks on; soon they die, if they may."""
        self.lasting_s[point] = LONG_S
        calls = seed.randint(4, 12)
        self._left[FOR_MINUTES[point]] = [calls]
        if self._may_die():
            self._left.setdefault("the ranks die after a call", [calls + seed.randint(0, 3)])

    def fail_starts(self, seed: Random) -> None:
        """Have starts fail, in one way perhaps again and again."""
        self.add(seed, 2, OF_STARTS)
        self._left[seed.choice([each for each in OF_STARTS if each != LOST])] = [1] * seed.choice(AGAIN)

    def start_well(self) -> bool:
        """Have no start fail from now on; return whether any did."""
        for each in OF_STARTS:
            self._left.pop(each, None)
        return self._failed_starts > 0

    def refuses(self, error: object) -> bool:
        """Return whether a request failed as its base model did not start twice in a row, as may be."""
        told = re.search(r"base model \S+ does not start: ", str(error))
        return self._failed_starts > 1 and told is not None

    @property
    def _failed_starts(self) -> int:
        return sum(self.hit[each] for each in OF_STARTS)

    def deadly(self) -> set[ModelKey]:
        """Return the models that the server may have given up, as the ranks died each time they came back."""
        return {model for (_, model), deaths in self.in_returns.items() if deaths >= WAKES}

    def _may_die(self) -> bool:
        return sum(len(left) for each, left in self._left.items() if each in DEATHS_OF_RANKS) < self._deaths

    def _plan(self, point: str, seed: Random) -> None:
        if point not in DEATHS_OF_RANKS or self._may_die():
            few = seed.choice((1, 1, 2, 3, 5, 8, 13, 21))
            most = PASSED if point in ANYWHERE else CHANGES if point == CHANGING else 0
            passages = seed.randint(1, most) if most else few
            self._left.setdefault(point, []).append(passages)

    def begin(self, point: str, now: float) -> None:
        self.lasts_until[point] = now + self.random.random() * self.lasting_s[point]

    def stop(self, point: str) -> None:
        for each in (point, FOR_MINUTES[point]):
            self._left.pop(each, None)
        self.lasts_until.pop(point, None)

    def spare_ranks(self) -> None:
        """Leave out later deaths of the ranks, so that no model is given up from now on."""
        most = max(0, WAKES - 1 - sum(self.hit[each] for each in DEATHS_OF_RANKS))
        for each in sorted(DEATHS_OF_RANKS & self._left.keys()):
            self._left[each], most = self._left[each][:most], max(0, most - len(self._left[each]))

    def end(self) -> None:
        self.ended = True
        self._left.clear()
        self.lasts_until.clear()
        self.disk_full_until = 0.0

    def awaits(self, point: str) -> bool:
        """Return whether a point will be a fault."""
        return bool(self._left.get(point))

    def due(self, point: str) -> bool:
        """Pass a point; return whether it is a fault this time."""
        left = self._left.get(point)
        if not left:
            return False
        left[0] -= 1
        if left[0]:
            return False
        del left[0]
        self.hit[point] += 1
        return True


def point(name: str) -> None:
    """Pass a point at which the process may die; one that is dead goes no further."""
    process = PROCESS.get()
    if process is None:
        return
    if process.dead:
        raise Crash
    at = f"{process.kind}: {name}"
    loop = _loop()
    loop.note(at)
    faults: Faults = process.server.faults
    if process.replaced:
        return
    if process.kind == "engine" and faults.due(TAKE_OVER):
        loop.call_soon(process.server.take_over, process, context=Context())
    if faults.due("the machine starts again"):
        process.server.reboot()
        raise Crash
    changing = process.kind == "engine" and faults.awaits(CHANGING) and process.is_changing()
    if faults.due(at) or (changing and faults.due(CHANGING)):
        process.kill()
        raise Crash
    if faults.due("the disk is full"):
        faults.disk_full_until = loop.time() + faults.random.random() * FULL_S


def fault(name: str) -> bool:
    """Return whether something else than the death of this process happens here."""
    process = PROCESS.get()
    return process is not None and process.server.faults.due(name)


def is_unread(error: object) -> bool:
    """Return whether an error is of a file that could not be read."""
    return os.strerror(errno.ESTALE) in str(error)


def disk_full() -> bool:
    process = PROCESS.get()
    return process is not None and _loop().time() < process.server.faults.disk_full_until


def lasts(name: str) -> bool:
    """Pass a point at which something may begin to fail; return whether it fails now, for a while."""
    process = PROCESS.get()
    if process is None:
        return False
    faults, now = process.server.faults, _loop().time()
    if faults.due(name):
        faults.begin(name, now)
    return bool(now < faults.lasts_until.get(name, 0.0))


def prolonged(name: str) -> None:
    """Pass a point at which something may begin to fail for minutes."""
    process = PROCESS.get()
    if process is not None and process.server.faults.due(FOR_MINUTES[name]):
        process.server.faults.begin(name, _loop().time())


def lasts_long(name: str) -> bool:
    """Return whether something fails now that does so for minutes."""
    process = PROCESS.get()
    if process is None or process.server.faults.lasting_s[name] < LONG_S:
        return False
    return bool(_loop().time() < process.server.faults.lasts_until.get(name, 0.0))


async def travel(most_s: float) -> None:
    """Take some time."""
    await asyncio.sleep(random_of_history().random() * most_s)


def random_of_history() -> Random:
    return _loop().random


def _loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop

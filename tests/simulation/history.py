"""One history: seeded requests of some models, and crashes at seeded points of the engine's work.

Real are the journal (SQLite), the engine's training side, its commits, snapshots and replay. The ranks are
scripted: their arithmetic is exact, so a checker that runs the requests one after another knows every result,
every checkpoint and the final state.
"""

import asyncio
import json
import random
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from skyrl_tinker.domain.ids import CheckpointKind, FutureStatus, ModelId, ModelKey, RequestKind
from skyrl_tinker.domain.values import Failure, PassItem, PassOutput
from skyrl_tinker.engine.trainer import trainer_driver
from skyrl_tinker.errors import TrainerError
from skyrl_tinker.protocol.protobuf import pass_results
from skyrl_tinker.protocol.stored_requests import LoadWeightsBody, SaveWeightsBody
from skyrl_tinker.store import checkpoint_records
from skyrl_tinker.store.database.group_commit import Op
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.futures.outcomes import Outcome
from skyrl_tinker.store.futures.record import Accepted
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.trainer_group import TrainerGroup
from tests.engine.support import journal
from tests.engine.support.world import STEPS_FILE, CapturedSteps, Workers, World

MODELS, REQUESTS, CRASHES = 3, 18, 4
"""Most of each in a history."""
WITHIN_S = 30.0
POINTS = (
    "before a commit",
    "after a commit",
    "before a call of the ranks",
    "after a call of the ranks",
    "while files are written",
    "the ranks die",
    "the ranks die after a call",
    "the ranks die while files are written",
)
KINDS = {"pass": 9, "forward": 2, "bad": 1, "refused": 1, "step": 6, "bad step": 1, "save": 2, "load": 1}


@dataclass
class Crashes:
    """Points at which the engine still has to crash, each after so many passages."""

    left: list[tuple[str, int]]
    hit: Counter[str] = field(default_factory=Counter)


@dataclass
class Life:
    """Life of one engine."""

    crashes: Crashes
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def point(self, name: str) -> bool:
        """Pass a point; return True if it is the next crash. A dead engine stays here for ever."""
        left = self.crashes.left
        if self.over.is_set():
            await asyncio.Event().wait()
        if not left or left[0][0] != name:
            return False
        left[0] = (name, left[0][1] - 1)
        if left[0][1] > 0:
            return False
        left.pop(0)
        self.crashes.hit[name] += 1
        return True

    async def end(self) -> None:
        self.over.set()
        await asyncio.Event().wait()


class CrashingStore:
    """The engine's store: it may die before and after each commit."""

    def __init__(self, store: Store, life: Life) -> None:
        self._store = store
        self._life = life

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def write(self, op: Op[Any], *done: Any) -> Any:
        if await self._life.point("before a commit"):
            await self._life.end()
        value = await self._store.write(op, *done)
        if await self._life.point("after a commit"):
            await self._life.end()
        return value


class CrashingWorkers(Workers):
    """`bad`: passes whose loss is not finite."""

    def __init__(self, life: Life, bad: set[tuple[ModelKey, int]]) -> None:
        super().__init__()
        self._life = life
        self._bad = bad

    async def _tell(self, what: str, value: Any) -> None:
        if await self._life.point("before a call of the ranks"):
            await self._life.end()
        if await self._life.point("the ranks die"):
            self.broken = TrainerError("killed before a call")
        await super()._tell(what, value)

    async def _after(self) -> None:
        self.busy_s += 1.0
        if await self._life.point("after a call of the ranks"):
            await self._life.end()
        if await self._life.point("the ranks die after a call"):
            self.broken = TrainerError("killed after a call")
            raise self.broken

    async def run_pass(self, items: Sequence[PassItem], row_budget: int | None = None) -> Any:
        result = await super().run_pass(items, row_budget)
        await self._after()
        return result

    async def optim_step(self, steps: Any) -> Any:
        result = await super().optim_step(steps)
        await self._after()
        return result

    async def persist_state(self, captured: CapturedSteps | str, directory: str) -> int:
        if await self._life.point("while files are written"):
            Path(directory).parent.mkdir(parents=True, exist_ok=True)
            (Path(directory).parent / f".{Path(directory).name}.dead.tmp").mkdir(exist_ok=True)
            await self._life.end()
        if await self._life.point("the ranks die while files are written"):
            self.broken = TrainerError("killed while it wrote")
            raise self.broken
        return await super().persist_state(captured, directory)

    def _output(self, item: PassItem) -> PassOutput | Failure:
        if (item.model, item.seq_id) in self._bad:
            return Failure("loss is not finite", "user")
        return super()._output(item)


@dataclass
class Request:
    kind: str
    seq_id: int
    source: str = ""  # of a load, the name of a save
    accepted: Accepted | None = None


@dataclass
class Truth:
    """What one model must have become, and what each request must have been answered."""

    steps: list[list[int]] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)
    poisoned: bool = False
    saves: dict[str, list[list[int]]] = field(default_factory=dict)

    def run(self, request: Request) -> float | bool:
        """Return the loss of a pass, and whether any other request succeeds."""
        match request.kind:
            case "pass":
                self.gradients.append(request.seq_id)
                return float(len(self.steps))
            case "forward":
                return float(len(self.steps))
            case "bad" | "refused":
                self.poisoned = True
                return False
            case "step":
                fine, self.poisoned = not self.poisoned, False
                if fine:
                    self.steps.append(self.gradients)
                self.gradients = []
                return fine
            case "bad step":
                self.gradients, self.poisoned = [], False
                return False
            case "save":
                self.saves[f"s{request.seq_id}"] = [list(step) for step in self.steps]
                return True
            case "load":
                self.steps, self.gradients = [list(step) for step in self.saves[request.source]], []
                self.poisoned = False
                return True
            case kind:
                raise AssertionError(kind)


class History:
    """One history in an empty directory. `run` raises AssertionError when the outcome is not the truth."""

    def __init__(self, seed: int, home: Path, template: Path) -> None:
        """`template`: a migrated database without rows."""
        self.random = random.Random(seed)
        self._home = home
        home.mkdir(parents=True)
        shutil.copyfile(template, home / "store.db")
        points = [
            (self.random.choice(POINTS), self.random.randint(1, 12))
            for _ in range(self.random.randint(0, CRASHES))
        ]
        self.crashes = Crashes(points)
        self._bad: set[tuple[ModelKey, int]] = set()

    async def run(self) -> None:
        self._store = Store.open(f"sqlite+aiosqlite:///{self._home / 'store.db'}")
        self._bell = Doorbell.bind(self._home, "engine")
        self._failure: BaseException | None = None
        self._start_engine()
        restarting = asyncio.create_task(self._restart_engines())
        try:
            async with asyncio.timeout(WITHIN_S):
                models = {
                    await self._create(): self._requests() for _ in range(self.random.randint(1, MODELS))
                }
                await self._submit(models)
                truths = {model: await self._check(model, requests) for model, requests in models.items()}
                self.crashes.left.clear()
                for model, truth in truths.items():
                    await self._check_state(model, truth, len(models[model]) + 1)
        finally:
            restarting.cancel()
            await self._stop_engine()
            self._bell.close()
            await self._store.close()

    def _start_engine(self) -> None:
        self._life = Life(self.crashes)
        self._workers = CrashingWorkers(self._life, self._bad)
        store = cast(Store, CrashingStore(self._store, self._life))
        trainer = cast(TrainerGroup, self._workers)
        self._world = World(store, self._bell, self._home / "checkpoints", trainer, replay_s=self._replay_s())

    def _replay_s(self) -> float:
        """Snapshots often, seldom or never."""
        return self.random.choice((1.0, 8.0, 1e9))

    async def _restart_engines(self) -> None:
        while True:
            waiting = asyncio.create_task(self._life.over.wait())
            await asyncio.wait((waiting, self._world.running), return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if not self._life.over.is_set():
                self._failure = self._world.running.exception()
                return
            await self._stop_engine()
            await self._store.write(lambda conn: None)  # behind what the dead one had begun to commit
            self._start_engine()

    async def _stop_engine(self) -> None:
        self._life.over.set()
        self._world.running.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await self._world.running

    async def _create(self) -> ModelId:
        created = await journal.submit_create(self._store, await journal.new_session(self._store))
        assert created.model_id is not None
        return created.model_id

    def _requests(self) -> list[Request]:
        requests: list[Request] = []
        for seq_id in range(1, self.random.randint(2, REQUESTS)):
            kind = self.random.choices(list(KINDS), list(KINDS.values()))[0]
            saves = [each for each in requests if each.kind == "save"]
            if kind == "load" and not saves:
                kind = "pass"
            source = f"s{self.random.choice(saves).seq_id}" if kind == "load" else ""
            requests.append(Request(kind, seq_id, source))
        return requests

    async def _submit(self, models: dict[ModelId, list[Request]]) -> None:
        """Interleave the models; now and then requests overtake each other, or wait for an answer."""
        queues = {model: _shuffled(requests, self.random) for model, requests in models.items()}
        while queues:
            model = self.random.choice(list(queues))
            request = queues[model].pop(0)
            request.accepted = await self._send(model, request)
            self._bell.ring("engine")
            if not queues[model]:
                del queues[model]
            if self.random.random() < 0.2:
                await asyncio.sleep(self.random.choice((0, 0.001, 0.01)))

    async def _send(self, model: ModelId, request: Request) -> Accepted:
        store, seq_id = self._store, request.seq_id
        refusal = Failure("wrong input", "user")
        match request.kind:
            case "pass" | "forward" | "bad":
                if request.kind == "bad":
                    self._bad.add((await journal.key_of(store, model), seq_id))
                only = request.kind == "forward"
                return await journal.submit_pass(store, model, seq_id, forward_only=only)
            case "refused":
                return await journal.submit(
                    store, model, seq_id, RequestKind.FORWARD_BACKWARD, failure=refusal
                )
            case "step":
                return await journal.submit_step(store, model, seq_id)
            case "bad step":
                return await journal.submit(store, model, seq_id, RequestKind.OPTIM_STEP, failure=refusal)
            case "save":
                body = SaveWeightsBody(f"s{seq_id}").to_bytes()
                return await journal.submit(store, model, seq_id, RequestKind.SAVE_WEIGHTS, body)
            case _:
                path = f"tinker://{model}/weights/{request.source}"
                body = LoadWeightsBody(path, optimizer=True).to_bytes()
                return await journal.submit(store, model, seq_id, RequestKind.LOAD_WEIGHTS, body)

    async def _check(self, model: ModelId, requests: list[Request]) -> Truth:
        """Check every result; returns what the model must have become."""
        truth = Truth()
        for request in requests:
            expected = truth.run(request)
            assert request.accepted is not None
            outcome = await self._outcome(request.accepted)
            found: float | bool = outcome.status is FutureStatus.DONE
            if found and request.kind in ("pass", "forward"):
                found = pass_results.metrics_of(outcome.body or b"")["loss:sum"]
            assert found == expected, (expected, request, outcome)
        return truth

    async def _check_state(self, model: ModelId, truth: Truth, next_seq: int) -> None:
        await self._outcome(await journal.submit_pass(self._store, model, next_seq, forward_only=True))
        trained = self._workers.trained[await journal.key_of(self._store, model)]
        assert (trained.steps, trained.gradients) == (truth.steps, truth.gradients), model
        for name, steps in truth.saves.items():
            with self._store.read() as conn:
                row = checkpoint_records.find_of_any_owner(conn, model, CheckpointKind.WEIGHTS, name)
            assert row is not None, name
            assert json.loads((Path(row.directory) / STEPS_FILE).read_text()) == steps

    async def _outcome(self, accepted: Accepted) -> Outcome:
        while (outcome := await journal.outcome(self._store, accepted)).status is FutureStatus.PENDING:
            if self._failure is not None:
                raise self._failure
            self._bell.ring("engine")
            await asyncio.sleep(0.002)
        return outcome


def _shuffled(requests: list[Request], random: random.Random) -> list[Request]:
    """Requests of an SDK overtake each other by a few places."""
    keyed = [(index + random.choice((0, 0, 0, 2.5, 4.5)), request) for index, request in enumerate(requests)]
    return [request for _, request in sorted(keyed, key=lambda each: each[0])]


def quicken() -> None:
    """Make idle engines keep their models at once."""
    trainer_driver.IDLE_S = 0.005

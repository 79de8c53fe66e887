"""One history: seeded requests of some models to a whole server, while a seed decides what goes wrong.

Real are the API, the store and the engine; ranks and samplers are scripted, and their arithmetic is exact.
So a checker that runs the requests one after another knows all answers, all checkpoints and the final state.
"""

import asyncio
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from sqlalchemy import Connection, text

from skyrl_tinker.config import Parity, Recovery, Settings
from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.peft_config import ADAPTER_FILE
from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.engine.parity.drift_monitor import METRIC
from skyrl_tinker.engine.trainer.model_returns import DIE_EACH_TIME
from skyrl_tinker.protocol.schemas.administration import ChangeBaseRequest
from skyrl_tinker.store import server_state
from skyrl_tinker.store.database import sqlite, tables
from skyrl_tinker.store.database.abstract_database import Database
from skyrl_tinker.store.database.migrate import migrate
from skyrl_tinker.store.database.opening import file_of, open_database
from skyrl_tinker.store.database.postgresql import PostgresDatabase
from skyrl_tinker.store.database.sqlite_database import SqliteDatabase
from skyrl_tinker.store.store import write_once
from skyrl_tinker.training.trainer_spec import retry_budget
from tests.api.support.world import BASE, FACTS, sample, step
from tests.simulation import silent, teacher
from tests.simulation.asgi_call import Answer
from tests.simulation.backends import DEADLY, NOT_FINITE, drawn
from tests.simulation.client import Client, error_of, loss_of, model_body, now, sequences
from tests.simulation.faults import (
    AWAY,
    COMPARED,
    FOR_MINUTES,
    OF_RESTS,
    OF_SAVES,
    OF_STORAGE,
    OF_SYNCS,
    OFTEN,
    RARE,
    TAKE_OVER,
    UNREAD,
    Faults,
    is_unread,
)
from tests.simulation.server import Server
from tests.simulation.silent import Silent
from tests.simulation.teacher import Teacher
from tests.simulation.virtual_loop import VirtualLoop
from tests.simulation.weight_ends import write_weights
from tests.support.scripted_trainer import STEPS_FILE

MODELS, REQUESTS, FAULTS = (1, 1, 2), 9, 5
"""Numbers of models to choose from, and most requests of each and faults in a history."""
WITHIN_S = 600.0
"""Virtual time in which all must be answered: less than a session lives without heartbeats."""
KINDS = {
    "pass": 8,
    "forward": 1,
    "bad": 1,
    "refused": 1,
    "deadly": 1,
    "step": 6,
    "bad step": 1,
    "save": 2,
    "load": 2,
    "publish": 2,
}
MISSING = "missing"
"""In an eighth of the histories: clients take a number for nothing now and then, and
send something with it once all else is answered, which is too late."""
STORED = (5, 9)
"""Seeds, modulo 16, of histories with object storage, whose machine comes back with an empty disk."""
TWO_APIS = (2, 3)
"""Seeds, modulo 16, of histories with two API processes, of which any may have a request."""
OTHER_BASE = (14, 15)
"""Seeds, modulo 16, of histories in which the server serves another base model for a time."""
MORE = (0, 5)
"""Seeds, modulo 7, of histories with more that may go wrong, drawn from a stream of its own."""
MORE_FAULTS = 3
LONG = 1
"""Of histories with object storage, and of MORE, a third by this remainder: there files are away for minutes,
also for those who write; models that come back meanwhile are parked, and wait for another start.
"""
LONG_WITHIN_S = 2400.0
SILENT = (4,)
"""Seeds, modulo 11, of histories in which one client more goes silent; but for those of OTHER_BASE."""
EARLY, EARLY_S, EARLY_FAULTS = (4, 7), 3.0, 3
"""Seeds, modulo 9, of histories in which saves are deleted while they are under way; most time until then."""
CLOCKS = (0, 4)
"""Seeds, modulo 13, of histories in which the clocks of processes differ, and a lease says who may commit."""
TEACHING = (2, 6, 11)
"""Seeds, modulo 13, of histories with a further base model, only sampled; but for those of OTHER_BASE."""
TRAINED = (5, 9, 12)
"""Seeds, modulo 13, of histories with a further base model that is trained; but for those of OTHER_BASE."""
RESTING, RESTS = (1, 2, 6), 3
"""Thirteenths of seeds, modulo 10, of histories in which the further base model is there on demand; and most
deaths about its starts and ends.
"""
IDLE_S, PAUSES_S = (0.5, 2.0, 8.0), (0.0, 0.0, 4.0, 20.0)
"""Times to choose from without requests after which it stops, and between requests."""
ASKED_S = (0.1, 1.0, 5.0, 30.0)
"""Times to choose from until an administrator starts or stops it."""
FAILING = (0, 3)
"""Thirteenths of seeds, modulo 5, of histories in which starts of the further base model fail."""
STARTED_S = 15.0
"""Time after which a base model has started that failed again and again."""
REFUSED_S = 5.0
"""Time until a creation is sent again."""
PROBED = (7, 8)
"""Seeds, modulo 13, of histories in which samplers are compared with the trainer after each sync."""
FULL, FULL_FAULTS = (3, 9, 14), 4
"""Seeds, modulo 17, of histories with full parameters, beside LoRA, and two samplers behind a router."""
PUBLISHED, RANKS = {"publish": 10}, (0, 0, 8)
TRANSPORTS: tuple[dict[str, Any], ...] = (
    {"weight_transport": "shared_memory"},
    {"weight_transport": "gloo"},
    {"weight_transport": "nccl", "device": "cuda"},
)
SWAPPED_S = 1.0
"""Time that a sample takes in these."""
TTLS, DELETED = (None, None, 3, 10), 0.3
"""Of these: times to live of saves to choose from, and how many of the others are deleted."""
GONE_S = 40.0
"""Time after the last fault in which what was deleted or has expired goes."""
CANCELLED = 0.1
"""Of samples."""
PARKED, OTHER = "parked", "other"
INFLIGHT = "publish inflight"
"""In a quarter of the histories, instead of some others: its clients follow newer ones of its kind."""
PUBLISHES = ("publish", INFLIGHT)
ROLLOUT_S = 4.0
"""Time that a sample takes in these."""
EXPORT = "export"
TOKENS = {"bad": NOT_FINITE, "deadly": DEADLY, "refused": FACTS.vocab_size}


@dataclass
class Request:
    """A training request; `answer` and `samples`, drawn from what it published, come with time.

    `drawable`: tokens that its samplers may draw, the newest last. `late`: a sample at the end.
    `lived`: from when to when it was under way. `gone`: from when to when what it saved was deleted, or
    expired after `ttl` seconds.
    """

    kind: str
    seq_id: int
    source: "Request | None" = None  # of a load, a save
    ttl: int | None = None
    lived: tuple[float, float] = (0.0, 0.0)
    gone: tuple[float, float] | None = None
    answer: Answer | None = None
    samples: list[Answer] = field(default_factory=list)
    drawable: list[list[int]] = field(default_factory=list)
    late: Answer | None = None

    @property
    def name(self) -> str:
        return f"s{self.seq_id}"

    @property
    def error(self) -> str | None:
        assert self.answer is not None
        return error_of(self.answer)

    @property
    def is_parked(self) -> bool:
        """Return whether its model was parked: a step may also tell of another request that failed so."""
        return re.match(r"model \S+ is parked", str(self.error)) is not None


@dataclass
class Truth:
    """What one model must have become, and what each request must have been answered.

    `parks`: reason for which it may have been parked meanwhile; "": any. `refuses`: whether
    an error is that of a base model which did not start.
    """

    parks: str | None = None
    refuses: Callable[[str | None], bool] = lambda _: False
    steps: list[list[int]] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)
    poisoned: bool = False
    saves: dict[str, list[list[int]]] = field(default_factory=dict)

    def run(self, request: Request) -> float | bool:
        """Return the loss of a pass, and whether any other request succeeds."""
        parked = self.parks is not None and request.is_parked and self.parks in str(request.error)
        if parked or self.refuses(request.error):
            if request.kind in ("step", "bad step"):  # it drops what it should have applied
                self.gradients, self.poisoned = [], False
            elif request.kind not in ("forward", "save", "load", *PUBLISHES):
                self.poisoned = True
            return False
        match request.kind:
            case "save" | "load" if is_unread(request.error):
                return False
            case "pass":
                self.gradients.append(request.seq_id)
                return float(len(self.steps))
            case "forward":
                return float(len(self.steps))
            case "bad" | "refused" | "deadly" | "missing" | "parked":
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
                self.saves[request.name] = [list(step) for step in self.steps]
                return True
            case "load":
                assert request.source is not None
                if request.source.name not in self.saves or _is_gone(request, request.source):
                    return False
                self.steps, self.gradients = [list(step) for step in self.saves[request.source.name]], []
                self.poisoned = False
                return True
            case each if each in PUBLISHES:
                return True
            case kind:
                raise AssertionError(kind)


def _is_gone(load: Request, save: Request) -> bool:
    """Return whether a load comes too late, as its answer says if it may or may not."""
    if save.gone is None or load.lived[1] < save.gone[0]:
        return False
    return load.lived[0] > save.gone[1] or "deleted or expired" in str(load.error)


@dataclass
class _Model:
    session: str
    base_model: str
    model_id: str
    requests: list[Request]


class History:
    """What is drawn for a seed decides what may come about; without it, the rest is as it is here."""

    _most_requests = REQUESTS
    _pauses_s = PAUSES_S
    _follows = _forgets = _stores = _parks = _probes = _crowds = False
    _exports = True
    _apis = 1
    _away: str | None = None
    _silence: Random | None = None
    _more: Random | None = None
    _early: Random | None = None
    _trained: Random | None = None
    _teaching: Random | None = None
    _resting: Random | None = None
    _failing: Random | None = None
    _clocks: Random | None = None
    _full: Random | None = None

    def __init__(self, seed: int, home: Path, template: Path, url: str) -> None:
        """`url`: of a database, which is emptied."""
        self._random = Random(seed)
        self._choose(seed)
        # Reads suspend their callers, as those of PostgreSQL do, or do not, whichever database it is.
        SqliteDatabase.local = PostgresDatabase.local = seed // 16 % 2 == 0
        self._home = home
        home.mkdir(parents=True)
        often = self._random.choice((1.0, 8.0, 1e9))  # snapshots: often, seldom or never
        settings = {"home": home, "recovery": _recovery(often), "database_url": url}
        if self._more:  # several machines share all but their homes
            shared = {each: f"{home}/shared/{each}" for each in ("checkpoints", "snapshots")}
            settings |= {"home": home / "host 0", **shared}
        if self._full:
            settings |= self._full.choice(TRANSPORTS)
        if self._probes:
            settings |= {"parity": Parity(probe_tokens=8)}
        if self._away == UNREAD:
            settings |= {"recovery": _recovery(1.0)}  # there are snapshots to be read
        if self._silence:
            settings |= silent.SETTINGS
        if self._stores:
            settings |= {each: f"file://{home}/bucket/{each}" for each in ("checkpoints", "snapshots")}
        self._settings = _settings().model_copy(update=settings)
        _empty(url)
        self._reader: tuple[Database, Connection] | None = None  # of the checks
        self._open = ExitStack()
        self._facts = replace(FACTS, directory=str(template))
        self._deadly = self._random.random() < 0.1
        self.faults = self._plan(seed)

    def _choose(self, seed: int) -> None:
        """Choose what may come about."""
        self._follows = seed % 4 == 0
        self._forgets = seed % 8 == 6
        self._stores = seed % 16 in STORED
        self._apis = 2 if seed % 16 in TWO_APIS else 1
        self._parks = seed % 16 in OTHER_BASE
        self._silence = None if self._parks else _stream("silence", seed, 11, SILENT)
        here = seed % 7 in MORE and not (self._stores or self._parks or self._forgets or self._silence)
        stored = self._stores and seed // 16 % 3 == LONG
        self._away = AWAY if stored else UNREAD if here and seed // 7 % 3 == LONG else None
        self._more = _stream("more", seed, 7, MORE)
        self._early = _stream("early", seed, 9, EARLY)
        self._trained = None if self._parks else _stream("trained", seed, 13, TRAINED)
        self._teaching = None if self._parks else _stream("teaching", seed, 13, TEACHING)
        if self._trained or self._teaching:
            self._resting = Random(f"resting of {seed}") if seed // 13 % 10 in RESTING else None
            self._failing = Random(f"failing of {seed}") if seed // 13 % 5 in FAILING else None
        self._clocks = _stream("clocks", seed, 13, CLOCKS)
        self._full = _stream("full", seed, 17, FULL)
        self._probes = seed % 13 in PROBED

    def _plan(self, seed: int) -> Faults:
        """Plan what comes about."""
        points, disks = (*OFTEN, *4 * OF_STORAGE) if self._stores else OFTEN, seed % 8 == 4
        faults = Faults(self._random, FAULTS, 1 if self._deadly else 2, points, disks=disks)
        if self._more:
            faults.add(self._more, MORE_FAULTS, RARE)
        if self._early:
            faults.add(self._early, EARLY_FAULTS, OF_SAVES)
        if self._full:
            faults.add(self._full, FULL_FAULTS, OF_SYNCS)
        if self._resting:
            faults.add(self._resting, RESTS, OF_RESTS)
        if self._failing:
            faults.fail_starts(self._failing)
        if self._away:
            faults.prolong(self._away, Random(f"away of {seed}"))
        return faults

    def run(self) -> int:
        """Return a digest of all that happened. Raises AssertionError when the outcome is not the truth."""
        loop = VirtualLoop(Random(self._random.getrandbits(64)))
        loop.run(self._story(loop))
        return loop.trace

    async def _story(self, loop: VirtualLoop) -> None:
        rollout_s = ROLLOUT_S if self._follows else SWAPPED_S if self._full else 0.0
        about = rollout_s, self._apis, self._clocks, 2 if self._full else 1
        further = self._other_base()
        self._bases = (self._facts, further) if self._trained else (self._facts,)
        bases = (*self._bases, teacher.FURTHER) if self._teaching else self._bases
        server = Server(self._settings, bases, self.faults, *about)
        server.draws[teacher.NAME] = teacher.draw
        if self._resting:
            idle_s = self._resting.choice(IDLE_S)
            server.idle_s = {facts.name: idle_s for facts in bases[1:]}
            server.crowded = self._crowds
        self._server = server
        self._client = Client(server, self.faults)
        self._silent = Silent(self._client, self._silence) if self._silence else None
        self._teacher = self._make_teacher()
        telling = asyncio.create_task(self._tell())
        asking = asyncio.create_task(self._ask_of_bases(bases[1:])) if self._resting else None
        try:
            async with asyncio.timeout(LONG_WITHIN_S if self._takes_long else WITHIN_S):
                await asyncio.wait((telling, server.failure), return_when=asyncio.FIRST_COMPLETED)
            for ended in (server.failure, telling):
                if ended.done():
                    ended.result()
            assert not loop.errors, loop.errors
        finally:
            telling.cancel()
            if asking:
                asking.cancel()
            server.stop()
            self._open.close()

    @property
    def _takes_long(self) -> bool:
        return bool(self._away or self._silence)

    def _make_teacher(self) -> Teacher | None:
        short = self._trained is not None  # else it is the only further base model, which may leave
        return Teacher(self._client, self._server, self._teaching, short=short) if self._teaching else None

    async def _ask_of_bases(self, on_demand: Sequence[BaseModelFacts]) -> None:
        """Start and stop base models on demand as an administrator, of an engine that may have died."""
        random, actions = self._resting, ("start", "stop", "stop")
        while random:
            await asyncio.sleep(random.choice(ASKED_S))
            asked = {"base_model": random.choice(on_demand).name, "action": random.choice(actions)}
            self._server.change_base(ChangeBaseRequest.model_validate(asked))

    async def _tell(self) -> None:
        count = self._random.choice(MODELS)
        living = asyncio.create_task(self._silent.live()) if self._silent else None
        teaching = asyncio.create_task(self._teacher.live()) if self._teacher else None
        models = await asyncio.gather(*(self._model() for _ in range(count)))
        await self._start_well()
        if self._parks:
            await self._park(models)
        if self._away == UNREAD:
            self.faults.stop(UNREAD)
        if self._was_away or self.faults.deadly():
            await self._start_again(models)
        truths = [self._truth(model) for model in models]
        both = list(zip(models, truths, strict=True))
        self.faults.stop(UNREAD)
        self.faults.spare_ranks()
        await asyncio.gather(*(self._epilogue(model, truth) for model, truth in both))
        if teaching:
            await teaching
        if self._silent and living:
            await living
            await self._resume(self._silent.path, self._silent.steps)
        self.faults.end()
        if self._silent or any(map(_gone, models)):
            await asyncio.sleep(GONE_S)
        for model, truth in both:
            await self._check_state(model, truth)
        if self._silent:
            with self._reading() as conn:
                key = self._silent.check(conn, self._server.directories)
            assert not any(key in ranks.trained for ranks in self._server.ranks.values())

    async def _start_well(self) -> None:
        """Have starts fail no more, and wait for those that have failed."""
        if self.faults.start_well():
            await asyncio.sleep(STARTED_S)

    async def _model(self, base_model: str | None = None) -> _Model:
        """Send all requests of a model, which overtake each other now and then, and wait for the answers.

        `base_model`: of the model, by default any that is trained.
        """
        session = await self._client.session()
        rank = self._full.choice(RANKS) if self._full else 8
        beating = asyncio.create_task(self._client.beat(session))
        if base_model is None:
            base_model = self._trained.choice(self._bases).name if self._trained else BASE
        created = await self._client.ok("create_model", model_body(session, rank, base_model))
        model = _Model(session, base_model, created["model_id"], self._requests())
        while error := error_of(await self._client.result(created["request_id"])):
            assert self.faults.refuses(error), error
            beating.cancel()
            await asyncio.sleep(REFUSED_S)
            model.session = await self._client.session()
            beating = asyncio.create_task(self._client.beat(model.session))
            created = await self._client.ok("create_model", model_body(model.session, rank, base_model))
            model.model_id = created["model_id"]
        sending, newest = [], 0
        for request in _shuffled([each for each in model.requests if each.kind != MISSING], self._random):
            sending.append(asyncio.create_task(self._request(model, request)))
            await asyncio.sleep(self._random.choice((0.0, 0.001, 0.05, 0.5)))
            newest = max(newest, request.seq_id)
            if self._resting and newest == len(sending):  # none waits for one that is still to come
                await asyncio.sleep(self._resting.choice(self._pauses_s))
        await asyncio.gather(*sending)
        if not self._takes_long:  # else it would be over, too
            beating.cancel()
        for request in model.requests:
            if request.kind == MISSING:
                await self._request(model, request)
                assert "never came" in str(request.error)
        for request in model.requests:
            if request.kind == INFLIGHT and request.error is None:
                request.late = await self._sample(request, 2)
        return model

    async def _start_again(self, models: list[_Model]) -> None:
        """Start the server again, and go on with these models."""
        self._server.serve(self._server.bases)
        await asyncio.gather(*(self._continue(model, "pass", "step") for model in models))

    def _other_base(self) -> BaseModelFacts:
        return replace(self._facts, directory=f"{self._facts.directory}/{OTHER}", names=(OTHER,))

    async def _park(self, models: list[_Model]) -> None:
        """Serve another base model for a time, then go on with these models."""
        self._server.serve((self._other_base(),))
        await asyncio.gather(*(self._continue(model, PARKED) for model in models))
        self._server.serve((self._facts,))
        await asyncio.gather(*(self._continue(model, "pass", "step", "pass", "step") for model in models))

    async def _continue(self, model: _Model, *kinds: str) -> None:
        for kind in kinds:
            request = Request(kind, len(model.requests) + 1)
            model.requests.append(request)
            await self._request(model, request)
            assert kind != PARKED or request.is_parked
        for request in model.requests:
            if PARKED not in kinds and request.kind in PUBLISHES and request.error is None:
                answer = await self._sample(request, 3 + len(request.samples))
                assert error_of(answer) is None, answer.text
                request.samples.append(answer)

    def _requests(self) -> list[Request]:
        requests: list[Request] = []
        kinds = KINDS | (PUBLISHED if self._full else {})
        for seq_id in range(1, self._random.randint(2, self._most_requests) + 1):
            kind = self._random.choices(list(kinds), list(kinds.values()))[0]
            saves = [each for each in requests if each.kind == "save"]
            if kind == "load" and not saves:
                kind = "save"
            if kind == "deadly" and not self._deadly:
                kind = "pass"
            if self._follows and (kind in ("publish", "forward") or (kind == "pass" and seq_id % 3 == 0)):
                kind = INFLIGHT
            source = self._random.choice(saves) if kind == "load" else None
            if self._forgets and self._random.random() < 0.2:
                kind, source = MISSING, None
            ttl = self._more.choice(TTLS) if self._more and kind == "save" else None
            requests.append(Request(kind, seq_id, source, ttl))
        if self._forgets:  # a refused one would not wait for those before it
            requests[-1].kind = "step"
        return requests

    async def _request(self, model: _Model, request: Request) -> None:
        began = now()
        deleting = None
        if self._early and request.kind == "save":
            deleting = asyncio.create_task(self._delete(model, request, self._early.random() * EARLY_S))
        request.answer = await self._client.result(await self._submit(model, request))
        request.lived = began, now()
        if deleting and await deleting is None:
            await self._delete(model, request, 0.0)
        if request.kind == "save" and self._more and not request.gone:
            await self._end(model, request, self._more)
        if request.kind in PUBLISHES and request.error is None:
            for number in range(self._random.randint(1, 2)):
                request.samples.append(await self._sample(request, number))

    async def _end(self, model: _Model, request: Request, more: Random) -> None:
        """Have a save expire, or delete it, or leave it as it is."""
        if request.ttl is not None:
            request.gone = request.lived[0] + request.ttl, request.lived[1] + request.ttl
            await asyncio.sleep(request.ttl)
        elif more.random() < DELETED:
            await self._delete(model, request, more.random() * 5.0)
            request.gone = request.gone or (now(), now())  # it had failed
        if request.gone is not None:
            await self._check_gone(f"tinker://{model.model_id}/weights/{request.name}")

    async def _delete(self, model: _Model, request: Request, after_s: float) -> bool | None:
        """Delete a save, which then is `gone`; returns whether it was there, None if nobody knows."""
        await asyncio.sleep(after_s)
        began = now()
        path = f"training_runs/{model.model_id}/checkpoints/weights/{request.name}"
        found = await self._client.delete(path)
        if found is not False:
            request.gone = (request.gone or (began,))[0], now()
        return found

    async def _sample(self, request: Request, number: int) -> Answer:
        assert request.answer is not None
        count = self._more.choice((1, 2, 3)) if self._more else 1
        body = sample(request.answer.json()["sampling_session_id"], number, num_samples=count)
        future = await self._client.submit("asample", body)
        if self._more and self._more.random() < CANCELLED:
            await asyncio.sleep(self._more.random())
            await self._client.ok("cancel_future", {"request_id": future})
            answer = await self._client.result(future)
            if "was cancelled" in str(error_of(answer)):  # else it had finished
                future = await self._client.submit("asample", body | {"seq_id": number + 10})
        answer = await self._client.result(future)
        assert error_of(answer) or len(sequences(answer)) == count
        return answer

    async def _epilogue(self, model: _Model, truth: Truth) -> None:
        """Export the model; make another one from one of its saves, train that, and unload it."""
        body = {"model_id": model.model_id, "seq_id": len(model.requests) + 1, "path": EXPORT}
        tasks = [self._succeeds("save_weights_external", body)]
        if kept := truth.saves.keys() - _gone(model):
            name = self._random.choice([each for each in truth.saves if each in kept])
            tasks.append(self._resume(f"tinker://{model.model_id}/weights/{name}", truth.saves[name]))
        await asyncio.gather(*tasks)

    async def _check_gone(self, path: str) -> None:
        """Check that nothing can be made of a save that is over."""
        answer = await self._client.post("load_weights", await self._creation(path))
        if answer.status_code == 200:
            answer = await self._client.result(answer.json()["request_id"])
        assert "deleted or expired" in answer.text, answer.text

    async def _creation(self, path: str) -> dict[str, Any]:
        session = await self._client.session()
        return {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}

    async def _resume(self, path: str, steps: list[list[int]]) -> None:
        creation = await self._creation(path)
        beating = asyncio.create_task(self._client.beat(creation["session_id"]))
        key = (await self._succeeds("load_weights", creation))["model_id"]
        for seq_id, loss in ((1, len(steps)), (3, len(steps) + 1)):
            passed = await self._client.result(
                await self._client.submit_pass(key, seq_id, 1, forward_only=False)
            )
            assert loss_of(passed) == loss
            await self._succeeds("optim_step", step(key, seq_id + 1))
        await self._succeeds("unload_model", {"model_id": key})
        late = await self._client.result(await self._client.submit("optim_step", step(key, 5)))
        assert "unloaded" in str(error_of(late))
        beating.cancel()

    async def _succeeds(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self._client.result(await self._client.submit(path, body))
        assert error_of(answer) is None, (path, answer.text)
        value: dict[str, Any] = answer.json()
        return value

    async def _submit(self, model: _Model, request: Request) -> str:
        submit, seq_id, key = self._client.submit, request.seq_id, model.model_id
        body: dict[str, Any] = {"model_id": key, "seq_id": seq_id}
        match request.kind:
            case "step":
                return await submit("optim_step", step(key, seq_id))
            case "bad step":
                return await submit("optim_step", step(key, seq_id, beta1=2.0))
            case "save":
                return await submit("save_weights", body | {"path": request.name, "ttl_seconds": request.ttl})
            case "load":
                assert request.source is not None
                path = f"tinker://{key}/weights/{request.source.name}"
                return await submit("load_weights", body | {"path": path, "optimizer": True})
            case "publish" | "publish inflight":
                kind = "snapshot" if request.kind == "publish" else "inflight"
                body |= {"sampling_session_seq_id": seq_id, "kind": kind}
                return await submit("save_weights_for_sampler", body)
            case kind:
                token = TOKENS.get(kind, 1)
                return await self._client.submit_pass(key, seq_id, token, forward_only=kind == "forward")

    # Checks

    @property
    def _was_away(self) -> bool:
        """Return whether files were away for long: any model may be parked then."""
        hit = self.faults.hit
        return self._away == UNREAD and bool(hit[UNREAD] or hit[FOR_MINUTES[UNREAD]])

    def _why_parked(self, model: _Model) -> str | None:
        """Return for which reason a model may be parked, if any: the ranks died in its returns alone."""
        if self._was_away:
            return ""
        with self._reading() as conn:
            return DIE_EACH_TIME if _key(conn, model) in self.faults.deadly() else None

    def _truth(self, model: _Model) -> Truth:
        """Check every answer; returns what the model must have become."""
        truth = Truth(self._why_parked(model), self.faults.refuses)
        for request in model.requests:
            assert request.answer is not None
            expected = truth.run(request)
            loss = loss_of(request.answer)
            found = request.error is None if loss is None else loss
            assert found == expected, (expected, request, request.error)
            if request.kind == "step" and request.error is None:
                self._check_gap(request.answer.json()["metrics"])
            tokens = drawn(truth.steps)
            for earlier in model.requests[: request.seq_id] if request.error is None else ():
                if earlier is request or earlier.kind == request.kind == INFLIGHT:
                    earlier.drawable.append(tokens)
        parked = self._was_away and any(request.is_parked for request in model.requests)
        for request in model.requests:
            for answer in request.samples:
                self._check_sample(answer, request.drawable, parked=parked)
            if request.late is not None:
                self._check_sample(request.late, request.drawable[-1:], parked=parked)
        return truth

    def _check_gap(self, metrics: dict[str, Any]) -> None:
        """Check that samplers agreed with the trainer, if they were compared before this step."""
        assert metrics.get(METRIC, 0.0) == 0.0, metrics
        self.faults.hit[COMPARED] += METRIC in metrics

    def _check_sample(self, answer: Answer, drawable: list[list[int]], *, parked: bool) -> None:
        """Check what was drawn; of a parked model only the next start makes the weights that were lost."""
        if error := error_of(answer):
            if self.faults.refuses(error):
                return
            assert parked, error
            assert re.match(r"model \S+ is parked: .*; its unnamed weights may come with it", error), error
            return
        for sequence in sequences(answer):
            first, last = sequence["tokens"]  # others may have been published between them
            assert any(
                first == each[0] and [last] in [newer[1:] for newer in drawable[at:]]
                for at, each in enumerate(drawable)
            )

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        if self._reader is None:
            database = self._open.enter_context(closing(open_database(self._settings.store_url, self._home)))
            self._reader = database, self._open.enter_context(database.connect())
        database, conn = self._reader
        with database.reading(conn):
            yield conn

    async def _check_state(self, model: _Model, truth: Truth) -> None:
        last = len(model.requests) + 1 + self._exports
        if self.faults.hit[TAKE_OVER] or self._away:  # that may have left files, as a start removes them
            self._server.serve(self._server.bases)
        await self._client.result(await self._client.submit_pass(model.model_id, last, 1, forward_only=True))
        with self._reading() as conn:
            key = _key(conn, model)
            columns = "name, directory, removed_at IS NULL"
            found = _rows(conn, f"SELECT {columns} FROM checkpoints WHERE model_key = :of", key)
            assert server_state.get(conn, server_state.WARNING) is None
            ((futures,),) = _rows(conn, "SELECT count(*) FROM futures WHERE model_key = :of", key)
            ran = "SELECT seq_id, unit, row_budget FROM futures WHERE model_key = :of"
            passes = _rows(conn, f"{ran} AND effect = 'gradients'", key)
        root = self._settings.checkpoint_root.resolve()
        here = {name: (self._settings.root / at).resolve().relative_to(root) for name, at, _ in found}
        root = self._home / "bucket" / "checkpoints" if self._stores else root
        saved = {name: root / here[name] for name, _, live in found if live}
        assert not any((root / at).exists() for name, at in here.items() if name not in saved)
        exported = saved.pop(EXPORT) if self._exports else None
        ranks = self._server.ranks[model.base_model]
        _check_units(passes, {seq_id: call for (of, seq_id), call in ranks.passed.items() if of == key})
        trained = ranks.trained[key]
        assert (trained.steps, trained.gradients) == (truth.steps, truth.gradients)
        kept = {name: steps for name, steps in truth.saves.items() if name not in _gone(model)}
        assert {name: json.loads((at / STEPS_FILE).read_text()) for name, at in saved.items()} == kept
        assert exported is None or (exported / ADAPTER_FILE).is_file()
        if not self._stores:
            written = (root / str(key)).glob("weights/[!.]*")
            assert set(written) == set(saved.values()), "nothing is left of saves that were repeated"
            assert exported is None or list(exported.parent.iterdir()) == [exported]
        assert futures == last + 1


def _check_units(passes: Sequence[Any], passed: Mapping[int, tuple[int, int]]) -> None:
    """Check that the ranks last ran passes together, and in rows of the size, as is recorded.

    `passes`: seq_id, unit and row budget of each; `passed`: number and row budget of the ranks' call by
    seq_id. A pass that killed the ranks in a replay runs apart, in smaller rows.
    """
    calls: dict[int, int] = {}  # by unit
    for seq_id, unit, row_budget in passes:
        number, budget = passed.get(seq_id, (0, 0))
        if number and budget != retry_budget(row_budget):
            assert budget == row_budget, (seq_id, budget, row_budget)
            assert calls.setdefault(unit, number) == number, (seq_id, unit)
    assert len(set(calls.values())) == len(calls), "no units ran together"


def _stream(name: str, seed: int, modulus: int, remainders: Sequence[int]) -> Random | None:
    """Return a stream of its own, for some seeds."""
    return Random(f"{name} of {seed}") if seed % modulus in remainders else None


def _gone(model: _Model) -> set[str]:
    return {each.name for each in model.requests if each.gone is not None}


def _key(conn: Connection, model: _Model) -> ModelKey:
    return ModelKey(_rows(conn, "SELECT key FROM models WHERE model_id = :of", model.model_id)[0][0])


def _rows(conn: Connection, sql: str, of: object) -> Sequence[Any]:
    return conn.execute(text(sql), {"of": of}).all()


def _shuffled(requests: list[Request], random: Random) -> list[Request]:
    """Requests of an SDK overtake each other by a few places."""
    keyed = [(index + random.choice((0, 0, 0, 2.5, 4.5)), request) for index, request in enumerate(requests)]
    return [request for _, request in sorted(keyed, key=lambda each: each[0])]


@cache
def _settings() -> Settings:
    return Settings(parity=Parity(probe_tokens=0))


def _recovery(replay_s: float) -> Recovery:
    return Recovery(replay_s=replay_s, snapshot_share=0.99)


def _empty(url: str) -> None:
    """Make a database as the template has it. Its connections stay, and what they have compiled."""
    names = list(tables.Base.metadata.tables)
    if file_of(url) is None:
        write_once(url, lambda conn: conn.execute(text(f"TRUNCATE {', '.join(names)} RESTART IDENTITY")))
        return
    with closing(open_database(url)) as database, database.connect() as conn:
        for statement in (
            "PRAGMA foreign_keys = OFF",  # else each row would be deleted for itself
            "BEGIN",
            *(f"DELETE FROM {name}" for name in (*names, "sqlite_sequence")),
            "COMMIT",
            "PRAGMA foreign_keys = ON",
            "PRAGMA incremental_vacuum",
            "PRAGMA wal_checkpoint(TRUNCATE)",
        ):
            sqlite.execute(conn, statement).fetchall()


def make_database(template: Path, file: Path) -> str:
    """Make a database in a file, for histories of one process; returns its URL."""
    shutil.copyfile(template / "store.db", file)
    return f"sqlite:///{file}"


def make_template(directory: Path) -> None:
    """Write what every history begins with: a database without rows, and a base model."""
    directory.mkdir(parents=True, exist_ok=True)
    migrate(f"sqlite:///{directory / 'store.db'}")
    (directory / OTHER).mkdir(exist_ok=True)
    for base, config in ((directory, "{}"), (directory / OTHER, '{"another": 1}')):
        (base / "config.json").write_text(config)
        write_weights(base, None)

#!/usr/bin/env python3
"""Cost of the engine's queues, and of its sampling side before 1, 8 and 64 replicas that compute nothing.

usage: scripts/bench/scale.py [--sessions N] [--models N] [--samples N] [--waiting N] [--answer-ms N]

First the queues alone, with samples of --sessions clients (three each) and work of --models (two passes and a
step each), and with a tenth and a hundredth of them. Then the replicas, if --samples is not 0.

The journal, the engine's queue, its client, vllm-router and the watch over the replicas are the real ones.
The replicas answer each request after --answer-ms, in a process of their own. Samples (64 prompt tokens, 16
sampled ones) are in the journal before the engine begins: --samples of them before each number of replicas,
once their connections are open, then --waiting at once before 64. Costs are the engine's processor time, so
that what the stand-ins and the router take on the same cores does not count: they bound samples per second of
the wall clock.

Needs the packages of `scripts/setup tests`. Ends by itself, with the default arguments after about five
minutes.

Prints, as its last line, one JSON object. take_us_N: choosing what begins after one sample of N sessions has
ended; drop_us_N: taking out one whose client gave up; queues_ms_N: a look at the queue; plan_ms_N_models:
planning a unit, the look ahead and the charge; plan_ms_N_uneven: where one model has a thousand requests and
the others have one each.
cleanup_ms_N: a run of all steps of the clean-up, with N unnamed versions of --models that are in use: as many
as ephemeral.keep of each, and a quarter more.
All five are medians of this process's time. heartbeats_cpu_N: cores that it takes to collect the heartbeats
of N sessions, one in ten seconds from each, and to write them to SQLite, with the engine's looks for silent
sessions; no HTTP, and less what the tasks of this script take for as many. heartbeats_http_cpu_N: cores of a
whole API process that gets the same heartbeats over HTTP, on 400 connections that stay open: most of it
is parsing and answering the requests.
restore_ready_s_N_models, restore_first_step_s_N_models: of the clock, from the start of an engine that finds
N models with a snapshot each, and whose ranks take no time but LOAD_S to check a snapshot's files, until it
takes work, and until a step of one of them; with active in place of models, where each has a pass and a step
to repeat. woken_s_N_models: of the clock, from there on until a step of each of N others that sleep, asked
all at once; saved_s_N_models: then until a save of each of N more. rss_mb: of this process, at its end.
For each number of replicas: samples_per_s (of one core of the engine), wall_per_s, cost_us (of a sample),
router_us; idle_share: of a core, when nothing is to be done;
fanout_p50_ms: an adapter on all replicas, each of which takes 20 ms; pause_p50_ms: pause and resume of all.
cost_ratio_64, fanout_ratio_64: to one replica. mb_per_10k_waiting: memory that waiting samples take. errors:
samples that failed, null with --samples 0.
"""

import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import aiohttp
import psutil
from acks import api_processes, together
from serving import options_of
from sqlalchemy import Connection, func, insert, select

from skyrl_tinker.api.waiting.heartbeats import Heartbeats
from skyrl_tinker.config import Settings
from skyrl_tinker.domain.ids import (
    FutureStatus,
    ModelId,
    ModelKey,
    ModelState,
    OwnerId,
    RequestId,
    RequestKind,
    SamplingSessionId,
    SessionId,
)
from skyrl_tinker.domain.peft_config import ADAPTER_FILE
from skyrl_tinker.domain.samples import SampleRequest, SamplingParams
from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.engine.bases.base_statuses import BaseStatuses
from skyrl_tinker.engine.bases.sample_dispatch import SampleDispatch
from skyrl_tinker.engine.colocation.placement import SEPARATE
from skyrl_tinker.engine.intake import Intake
from skyrl_tinker.engine.outbox import Outbox
from skyrl_tinker.engine.sampler import launch
from skyrl_tinker.engine.sampler.adapter_cache import AdapterLimits
from skyrl_tinker.engine.sampler.ephemeral_versions import EphemeralVersions
from skyrl_tinker.engine.sampler.fleet import Fleet
from skyrl_tinker.engine.sampler.sampler_driver import SamplerDriver
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.engine.sampler.tmpfs_spill import TmpfsSpill
from skyrl_tinker.engine.scheduling.lanes import Lanes
from skyrl_tinker.engine.scheduling.planner import PassBudget, Planner
from skyrl_tinker.engine.scheduling.row_work import model_of
from skyrl_tinker.engine.scheduling.sample_queue import SampleQueue
from skyrl_tinker.engine.scheduling.slots import Concurrency, Slots
from skyrl_tinker.engine.scheduling.throughput import TrainerPace
from skyrl_tinker.engine.status import EngineStatus
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.engine.upkeep.cleanup import Cleanup
from skyrl_tinker.engine.upkeep.upkeep_step import SWEEP_S
from skyrl_tinker.inference.constants import RESERVED_SEQUENCES
from skyrl_tinker.inference.servers.external_servers import ExternalServers
from skyrl_tinker.inference.vllm.vllm_process import VllmProcess
from skyrl_tinker.protocol.stored_requests import SaveWeightsBody, sample_body
from skyrl_tinker.store import sampling_sessions, session_records, weight_versions
from skyrl_tinker.store.database.migrate import migrate
from skyrl_tinker.store.database.tables import AdapterVersion, Future, Model, Session
from skyrl_tinker.store.doorbell import Doorbell, SocketBell
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.futures.record import Accepted
from skyrl_tinker.store.futures.sample_submission import NewSample, submit_sample
from skyrl_tinker.store.replay import snapshot_records
from skyrl_tinker.store.replay.snapshot_records import SnapshotRow
from skyrl_tinker.store.session_records import BEAT_S
from skyrl_tinker.store.store import Store
from skyrl_tinker.system.processes import freeze_gc, raise_open_files_limit
from skyrl_tinker.training.trainer_group import TrainerGroup
from tests.engine.support import journal
from tests.engine.support.world import World
from tests.support.processes import below, title
from tests.support.reads import reading
from tests.support.scripted_replica import CONTEXT
from tests.support.scripted_trainer import ScriptedTrainer, write_steps
from tests.support.serve import KINDS
from tests.support.sqlite_file import new_file
from tests.support.stand_in_replicas import stand_ins

REPLICAS = (1, 8, 64)
SENT = RequestKind.FORWARD_BACKWARD, RequestKind.FORWARD, RequestKind.OPTIM_STEP
VERSIONS = 32, 40
"""Of each model: as many as are kept in any case, and more."""
IN_FLIGHT, TENANTS, TAKES, DROPS, PLANS, VIEWS = 256, 7, 400, 20, 40, 9
FLOOD = 1000  # requests of one model
CLIENTS = 16
PROMPT, SAMPLED = 64, 16
PER_CORE = 64
"""Sequences in flight per replica."""
LOAD_S = 0.02
WOKEN = 200
REPEATS = 20
IDLE_S = 5.0
BEATS_S, BEATS_EVERY_S, BEATS_AT_ONCE = 20.0, 0.05, 400
AT_ONCE = 1000  # submissions in one commit
MB = 2**20
FACTS = BaseModelFacts(
    "/nowhere", ("tiny",), "Qwen3ForCausalLM", 512, CONTEXT, 2, 1, 64, 64, True, eos_token_ids=(0,)
)


@dataclass
class Engine:
    """The engine's sampling side, on a journal and before replicas."""

    store: Store
    bell: Doorbell
    fleet: Fleet
    driver: SamplerDriver
    samples: SampleDispatch
    intake: Intake
    samplers: Samplers
    clients: list[SamplingSessionId]
    sent: int = 0

    async def submit(self, count: int) -> None:
        """Put samples into the journal, in turn from each client."""
        for first in range(self.sent, self.sent + count, AT_ONCE):
            numbers = range(first, min(first + AT_ONCE, self.sent + count))
            await self.store.write(lambda conn, numbers=numbers: self._submit(conn, numbers))
        self.sent += count

    def _submit(self, conn: Connection, numbers: range) -> None:
        for number in numbers:
            prompt = tuple((number * 7 + each) % 500 for each in range(PROMPT))
            body = sample_body(SampleRequest(prompt, 1, SamplingParams(max_tokens=SAMPLED)))
            client = self.clients[number % CLIENTS]
            submit_sample(conn, NewSample(client, number // CLIENTS, b"", body, 1, SAMPLED, 1), None).value()

    async def counted(self, status: FutureStatus) -> int:
        query = select(func.count()).where(Future.status == status)
        return await self.store.read(lambda conn: conn.scalar(query)) or 0

    async def work_off(self) -> tuple[float, float, float]:
        """Answer all that is in the journal; returns seconds of the clock, of this process, of the router."""
        router = self.router()
        began, busy, routed = time.perf_counter(), time.process_time(), _busy(router)
        running = asyncio.create_task(self.driver.run())
        while self.driver.queued() or self.driver.in_flight():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        taken = time.perf_counter() - began, time.process_time() - busy, _busy(router) - routed
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        return taken

    def router(self) -> psutil.Process | None:
        return next((each for each in below(os.getpid()) if KINDS["router"] in title(each)), None)


def _busy(process: psutil.Process | None) -> float:
    return sum(process.cpu_times()[:2]) if process else 0.0


@asynccontextmanager
async def engine(replicas: int, answer_s: float) -> AsyncIterator[Engine]:
    async with AsyncExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = tuple(
            stack.enter_context(stand_ins(replicas, answer_s=answer_s, load_s=LOAD_S, tokens=SAMPLED))
        )
        settings = Settings(home=home, sampler_urls=urls)
        migrate(settings.store_url)
        store = Store.open(settings.store_url)
        stack.push_async_callback(store.close)
        bell = SocketBell.bind(home, "engine")
        stack.callback(bell.close)
        servers = ExternalServers(
            urls, startup_s=30.0, hang_s=30.0, max_model_len=CONTEXT + 1, dialect=VllmProcess().dialect
        )
        await servers.ready()
        to_end: launch.ToEnd = []
        fleet = launch.make_fleet(settings, "of the router", SEPARATE, FACTS.directory, to_end)
        await launch.open_fleet(settings, fleet, servers, home, to_end)
        for end in to_end:
            stack.push_async_callback(end)
        metrics = Metrics()
        samplers = Samplers(fleet, cast(Any, None), FACTS, AdapterLimits(8, 8), metrics)
        outbox = Outbox(store, bell, metrics)
        driver = SamplerDriver(store, samplers, outbox, Concurrency(PER_CORE, PER_CORE), metrics)
        samples = SampleDispatch([driver], outbox, metrics)
        intake = Intake(store, bell, cast(Any, None), samples, metrics)  # no training arrives
        session = await journal.new_session(store)
        clients = [
            await store.write(
                lambda conn, number=number: sampling_sessions.create(
                    conn, session, number, base_model=FACTS.name, model_path=None, version_id=None
                )
            )
            for number in range(CLIENTS)
        ]
        statuses = BaseStatuses(EngineStatus(store, bell), {FACTS.name: fleet})
        running = [
            asyncio.create_task(fleet.supervise(statuses.report, samplers.equip)),
            asyncio.create_task(intake.run(0)),
        ]
        freeze_gc()  # as the engine does
        try:
            yield Engine(store, bell, fleet, driver, samples, intake, samplers, clients)
        finally:
            for task in running:
                task.cancel()
            await asyncio.wait(running)


def _row(number: int, session: str, kind: RequestKind, model: ModelKey | None, seq_id: int) -> QueuedRow:
    return QueuedRow(
        id=number,
        request_id=RequestId(str(number)),
        kind=kind,
        session_id=SessionId(session),
        owner_id=OwnerId(int(session.split()[1]) % TENANTS),
        model_key=model,
        sampling_session_id=None,
        seq_id=seq_id,
        status=FutureStatus.PENDING,
        body_bytes=1600,
        created_at=0.0,
        tokens=PROMPT + SAMPLED + number % 13,
    )


def take_us(sessions: int) -> tuple[float, float, float]:
    """Return microseconds of a choice and of a drop, and the milliseconds of a look at the queue."""
    queue, numbers = SampleQueue(Slots(Concurrency(IN_FLIGHT, IN_FLIGHT), lambda: 1)), itertools.count()

    def send(client: int) -> None:
        queue.add([_row(next(numbers), f"client {client}", RequestKind.SAMPLE, None, 0)])

    for client in [*range(sessions)] * 3:
        send(client)
    flying = deque(turn.id for turn in queue.take(IN_FLIGHT + RESERVED_SEQUENCES))
    takes, drops, views = [], [], []
    for number in range(TAKES):
        ended = flying.popleft()
        began = time.process_time()
        queue.release([ended])
        turns = queue.take(IN_FLIGHT)
        takes.append(time.process_time() - began)
        flying += [turn.id for turn in turns]
        send(number % sessions)
    for _ in range(VIEWS):
        began = time.process_time()
        queue.view()
        views.append(time.process_time() - began)
    last = next(numbers)
    for number in range(last - min(DROPS, sessions), last):
        began = time.process_time()
        queue.discard([number])
        drops.append(time.process_time() - began)
    return 1e6 * statistics.median(takes), 1e6 * statistics.median(drops), 1e3 * statistics.median(views)


def plan_ms(models: int, *, uneven: bool = False) -> float:
    """Return the milliseconds of a unit's planning, while as much comes as is taken.

    Each model has three waiting requests; `uneven`: one, but the first, which has FLOOD.
    """
    lanes, pace, numbers = Lanes(), TrainerPace(), itertools.count()
    planner = Planner(lanes, PassBudget(8192, 1.0), pace.seconds)
    places = [enumerate(itertools.cycle(SENT)) for _ in range(models)]

    def send(model: int) -> None:
        seq_id, kind = next(places[model])
        lanes.add(_row(next(numbers), f"tenant {model}", kind, ModelKey(model), seq_id))

    for model in range(models):
        lanes.open(ModelKey(model))
    for model in [*range(models), *[0] * FLOOD] if uneven else [*range(models)] * 3:
        send(model)
    times, ahead = [], None
    for _ in range(PLANS):
        began = time.process_time()
        unit = planner.pop(ahead.rows if ahead else ())
        assert unit is not None
        ahead = planner.full_pass_ahead()
        planner.charge(pace.attribute(unit.rows, 0.1, {}))
        times.append(time.process_time() - began)
        for row in unit.rows:
            send(int(model_of(row)))
    return 1e3 * statistics.median(times)


def queues(sessions: int, models: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for share in (100, 10, 1):
        taken_us, dropped_us, viewed_ms = take_us(max(1, sessions // share))
        found[f"take_us_{sessions // share}"] = round(taken_us, 1)
        found[f"drop_us_{sessions // share}"] = round(dropped_us, 1)
        found[f"queues_ms_{sessions // share}"] = round(viewed_ms, 1)
        found[f"plan_ms_{models // share}_models"] = round(plan_ms(max(1, models // share)), 2)
    found[f"plan_ms_{models}_uneven"] = round(plan_ms(models, uneven=True), 2)
    return found


async def _p50_ms(call: Callable[[int], Awaitable[Any]]) -> float:
    times = []
    for number in range(REPEATS):
        began = time.perf_counter()
        await call(number)
        times.append(1e3 * (time.perf_counter() - began))
    return round(statistics.median(times), 1)


async def _fill(made: Engine, count: int) -> None:
    """Submit, and wait until the engine's queue has all."""
    await made.submit(count)
    made.bell.ring("engine")
    while made.driver.queued() < count:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


def _keep_sessions(conn: Connection, count: int) -> list[SessionId]:
    """Insert live sessions."""
    now = time.time()
    common = {"tags": [], "user_metadata": {}, "sdk_version": "", "created_at": now, "last_heartbeat_at": now}
    named = [SessionId(f"session {number}") for number in range(count)]
    conn.execute(insert(Session), [common | {"session_id": name} for name in named])
    return named


def _keep_versions(conn: Connection, sessions: int, models: int, versions: int) -> None:
    """Insert live sessions, and models of the first of them, each with so many unnamed weights."""
    now, named = time.time(), _keep_sessions(conn, sessions)
    lora = {"lora_rank": 8, "seed": 1, "train_mlp": True, "train_attn": True, "train_unembed": True}
    model = {"model_seq_id": 0, "base_model": FACTS.name, "optimizer_config": {}, "user_metadata": {}} | lora
    made = model | {"state": ModelState.READY, "created_at": now, "last_request_at": now}
    owned = [made | {"session_id": name, "model_id": name} for name in named[:models]]
    conn.execute(insert(Model), owned)
    keys = conn.scalars(select(Model.key).where(Model.model_id.in_(select(Session.session_id)))).all()
    version = {"kind": "lora", "durable": False, "directory": "/nowhere", "created_at": now, "size_bytes": 1}
    conn.execute(
        insert(AdapterVersion), [version | {"model_key": key} for key in keys for _ in range(versions)]
    )


async def cleanup_ms(sessions: int, models: int, versions: int) -> float:
    """Return the milliseconds of one run of all steps of the clean-up that finds nothing to remove."""
    async with engine(1, 0.0) as made:
        await made.store.write(lambda conn: _keep_versions(conn, max(sessions, models), models, versions))
        with tempfile.TemporaryDirectory() as home:
            settings = Settings(home=Path(home))
            spill = TmpfsSpill(Path(home), Path(home))
            forget = made.samples.forget_sources
            ephemeral = EphemeralVersions(made.store, [made.samplers], forget, spill, settings)
            cleanup = Cleanup(
                made.store, cast(Any, None), made.samples, lambda _: False, ephemeral, settings
            )  # no model is released
            times = []
            for _ in range(VIEWS):
                began = time.process_time()
                await cleanup.sweep()
                times.append(time.process_time() - began)
        kept = await made.store.read(lambda conn: len(weight_versions.ephemeral_sizes(conn)))
        assert kept == models * versions, "each is in use"
        return 1e3 * statistics.median(times)


async def _each_beats(
    sessions: list[SessionId], beat: Callable[[SessionId], Coroutine[Any, Any, None]]
) -> None:
    """Send the heartbeats of BEATS_S, evenly, and wait for the answers."""
    turns, sent, began = itertools.cycle(sessions), 0, time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        while (at := time.perf_counter() - began) < BEATS_S:
            due = int(len(sessions) * at / BEAT_S)
            for session in itertools.islice(turns, due - sent):
                tasks.create_task(beat(session))
            sent = due
            await asyncio.sleep(BEATS_EVERY_S)


async def _cores(sessions: list[SessionId], beat: Callable[[SessionId], Coroutine[Any, Any, None]]) -> float:
    busy = time.process_time()
    await _each_beats(sessions, beat)
    return (time.process_time() - busy) / BEATS_S


async def _nothing(session: SessionId) -> None: ...


async def heartbeats_cpu(sessions: int) -> float:
    """Return the cores that it takes to collect and write heartbeats, and to look for silent sessions."""
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        store, settings = Store.open(new_file(home / "store.db"), home), Settings(home=home)
        named = await store.write(partial(_keep_sessions, count=sessions))
        beats = Heartbeats(store)
        running = asyncio.create_task(beats.run())
        cores = await _cores(named, lambda session: beats.keep(None, session)) - await _cores(named, _nothing)
        running.cancel()
        looks, silent = [], (settings.timeouts.session_s, settings.retention.history_s)
        for _ in range(VIEWS):
            busy = time.process_time()
            assert not await store.fetch(
                lambda conn: session_records.list_expired(conn, store.now(), *silent)
            ), "all beat"
            looks.append(time.process_time() - busy)
        await store.close()
        return cores + statistics.median(looks) / SWEEP_S


async def heartbeats_http_cpu(sessions: int) -> float:
    """Return the cores of an API process that gets heartbeats."""
    with tempfile.TemporaryDirectory() as directory:
        settings = Settings(home=Path(directory))
        migrate(settings.store_url)
        store = Store.open(settings.store_url)
        named = await store.write(partial(_keep_sessions, count=sessions))
        await store.close()
        async with api_processes(settings) as url:
            (api,) = (each for each in below(os.getpid()) if KINDS["API"] in title(each))
            busy = _busy(api)
            await asyncio.to_thread(together, 1, _beat_over_http, url, named)
            return (_busy(api) - busy) / BEATS_S


def _beat_over_http(url: str, sessions: list[SessionId]) -> None:
    asyncio.run(_send_beats(url, sessions))


async def _send_beats(url: str, sessions: list[SessionId]) -> None:
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=BEATS_AT_ONCE)) as http:

        async def beat(session: SessionId) -> None:
            async with http.post("session_heartbeat", json={"session_id": session}) as answer:
                assert answer.status == 200, await answer.text()

        await _each_beats(sessions, beat)


class CheckingRanks(ScriptedTrainer):
    async def load_state(self, model: ModelKey, directory: str, *, optimizer: bool) -> None:
        await asyncio.sleep(LOAD_S)  # its files are checked, beside what else the ranks do
        await super().load_state(model, directory, optimizer=optimizer)


async def restore(models: int, *, active: bool = False) -> dict[str, float]:
    """Return seconds until an engine that finds models with snapshots is ready, and to steps of them.

    `active`: they have trained since their snapshots.
    """
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        store, bell = Store.open(new_file(home / "store.db"), home), SocketBell.bind(home, "engine")
        before = World(store, bell, home / "checkpoints")
        trained = [await before.model() for _ in range(models)]
        await asyncio.gather(*(_train(before, model, 1) for model in trained))
        if active:
            await asyncio.gather(*(_train(before, model, 3) for model in trained))
        before.running.cancel()
        await asyncio.wait([before.running])
        for model in trained:
            kept = home / "snapshots" / model.partition(":")[0]
            write_steps(kept, [[1]])
            row = SnapshotRow(2, str(kept), optimizer=True)
            key = await journal.key_of(store, model)
            await store.write(partial(snapshot_records.put, model=key, snapshot=row))
        began = time.perf_counter()
        after = World(store, bell, home / "checkpoints", cast(TrainerGroup, CheckingRanks()))
        await after.until(lambda: after.ready)
        ready_s = time.perf_counter() - began
        await _train(after, trained[models // 2], 5 if active else 3)
        first_step_s = time.perf_counter() - began
        kind = "active" if active else "models"
        found = {
            f"restore_ready_s_{models}_{kind}": round(ready_s, 2),
            f"restore_first_step_s_{models}_{kind}": round(first_step_s, 2),
        }
        if not active:
            asleep = [model for model in trained if model != trained[models // 2]]
            woken, saved = asleep[:WOKEN], asleep[WOKEN : 2 * WOKEN]
            woken_s = await _all_done_s(after, (_ask(after, model, 3) for model in woken))
            found[f"woken_s_{len(woken)}_models"] = round(woken_s, 2)
            saved_s = await _all_done_s(after, (_save(after, model, 3) for model in saved))
            found[f"saved_s_{len(saved)}_models"] = round(saved_s, 2)
        after.running.cancel()
        await asyncio.wait([after.running])
        bell.close()
        await store.close()
        return found


async def _all_done_s(world: World, asked: Iterable[Awaitable[Accepted]]) -> float:
    """Return the seconds until all that is asked at once is done."""
    began = time.perf_counter()
    await asyncio.gather(*asked)
    await world.until(lambda: _counted(world.store, FutureStatus.PENDING), (0).__eq__)
    assert not _counted(world.store, FutureStatus.FAILED)
    return time.perf_counter() - began


async def _train(world: World, model: ModelId, seq_id: int) -> None:
    done = await world.done(await _ask(world, model, seq_id))
    assert done.status is FutureStatus.DONE


async def _ask(world: World, model: ModelId, seq_id: int) -> Accepted:
    await journal.submit_pass(world.store, model, seq_id)
    return await journal.submit_step(world.store, model, seq_id + 1)


async def _save(world: World, model: ModelId, seq_id: int) -> Accepted:
    body = SaveWeightsBody("a").to_bytes()
    return await journal.submit(world.store, model, seq_id, RequestKind.SAVE_WEIGHTS, body)


def _counted(store: Store, status: FutureStatus) -> int:
    with reading(store) as conn:
        return conn.scalar(select(func.count()).where(Future.status == status)) or 0


async def measure(replicas: int, samples: int, waiting: int, answer_s: float) -> dict[str, float]:
    async with engine(replicas, answer_s) as made:
        control = made.fleet.client.control

        async def pause(number: int) -> None:
            await control.pause()
            await control.resume()

        busy = time.process_time()
        await asyncio.sleep(IDLE_S)
        idle = (time.process_time() - busy) / IDLE_S
        with tempfile.TemporaryDirectory() as adapter:
            (Path(adapter) / ADAPTER_FILE).touch()  # which stand-ins look for, and do not read
            fanout = await _p50_ms(lambda number: control.load_adapter(f"v{number}", adapter))
        paused = await _p50_ms(pause)
        warm_up = PER_CORE * replicas  # a connection for each that is in flight
        await _fill(made, warm_up)
        await made.work_off()
        await _fill(made, samples)
        wall_s, busy_s, routed_s = await made.work_off()
        found = {
            "samples_per_s": round(samples / busy_s),
            "wall_per_s": round(samples / wall_s),
            "cost_us": round(1e6 * busy_s / samples),
            "router_us": round(1e6 * routed_s / samples),
            "idle_share": round(idle, 3),
            "fanout_p50_ms": fanout,
            "pause_p50_ms": paused,
        }
        if waiting:
            before = psutil.Process().memory_info().rss
            await _fill(made, waiting)
            grown = psutil.Process().memory_info().rss - before
            found["mb_per_10k_waiting"] = round(grown / MB / waiting * 10_000, 1)
            wall_s, busy_s, _ = await made.work_off()
            found["flood_per_s"] = round(waiting / busy_s)
            found["flood_wall_s"] = round(wall_s, 1)
        found["errors"] = warm_up + samples + waiting - await made.counted(FutureStatus.DONE)
        return found


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--models", type=int, default=1_000)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--waiting", type=int, default=100_000)
    parser.add_argument("--answer-ms", type=float, default=50.0)
    arguments = parser.parse_args()
    raise_open_files_limit()
    report: dict[str, float | None] = {"errors": None}
    report |= queues(arguments.sessions, arguments.models)
    for versions in VERSIONS:
        cleaned_ms = asyncio.run(cleanup_ms(arguments.sessions, arguments.models, versions))
        report[f"cleanup_ms_{arguments.models * versions}"] = round(cleaned_ms, 1)
    for name, cores in (
        ("heartbeats_cpu", heartbeats_cpu),
        ("heartbeats_http_cpu", heartbeats_http_cpu),
    ):
        report[f"{name}_{arguments.sessions}"] = round(asyncio.run(cores(arguments.sessions)), 3)
    for active in (False, True):
        report |= asyncio.run(restore(arguments.models, active=active))
    print("  ".join(f"{name} {value}" for name, value in report.items()))
    measured = {}
    for replicas in REPLICAS if arguments.samples else ():
        waiting = arguments.waiting if replicas == REPLICAS[-1] else 0
        found = asyncio.run(measure(replicas, arguments.samples, waiting, arguments.answer_ms / 1e3))
        print(f"{replicas:3d} replicas  " + "  ".join(f"{name} {value}" for name, value in found.items()))
        report |= {f"{name}_{replicas}": value for name, value in found.items() if name != "errors"}
        measured[replicas] = found
    if measured:
        one, many = measured[1], measured[64]
        report["errors"] = sum(found["errors"] for found in measured.values())
        report["cost_ratio_64"] = round(many["cost_us"] / one["cost_us"], 2)
        report["fanout_ratio_64"] = round(many["fanout_p50_ms"] / one["fanout_p50_ms"], 2)
    report["rss_mb"] = round(psutil.Process().memory_info().rss / MB)
    print(json.dumps(report))


if __name__ == "__main__":
    main()

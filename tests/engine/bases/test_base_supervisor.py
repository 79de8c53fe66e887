"""The start of one base model beside others: what ends it, and what its requests are told."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from skyrl_tinker.engine.bases import base_room, base_supervisor
from skyrl_tinker.engine.bases.base_room import BaseRoom
from skyrl_tinker.engine.bases.base_runtime import ReportParts
from skyrl_tinker.engine.bases.base_statuses import BaseStatuses
from skyrl_tinker.engine.bases.base_supervisor import BaseSupervisor
from skyrl_tinker.engine.colocation.placement import SEPARATE
from skyrl_tinker.engine.scheduling.sample_gate import SampleGate
from skyrl_tinker.engine.status import EngineStatus
from skyrl_tinker.errors import SamplerError, StartupError, TrainerError, TrainerLostError, WeightsAwayError
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.store import Store
from tests.support.scripted_samplers import ScriptedSamplers
from tests.support.waiting import until

LOG = (
    "sampler of b: vLLM ended while starting; its log ends with:\nINFO loading\nValueError: damaged\n"
    "    For further information visit https://errors.pydantic.dev/2.14/v/value_error\n"
)
WHY = "base model b does not start: ValueError: damaged"


class Scripted:
    """Processes whose starts fail with `failures`, each when it may `go_on`."""

    parts = ("sampler of b",)

    def __init__(self, *failures: Exception) -> None:
        self.failures = [*failures]
        self.starts = self.ends = 0
        self.go_on = asyncio.Semaphore(0)

    async def start(self, report: ReportParts) -> None:
        self.starts += 1
        await report(self.parts)
        await self.go_on.acquire()
        async with asyncio.TaskGroup() as tasks:  # as the real ones
            if self.failures and not isinstance(self.failures[0], StartupError):
                tasks.create_task(_fail(self.failures.pop(0)))

    async def check(self) -> None:
        if self.failures:
            raise self.failures.pop(0)

    async def end(self) -> None:
        self.ends += 1


async def _fail(error: Exception) -> None:
    raise error


class Driver:
    """Brings no model back, and works until it is `lost`; fails of `deaths` before that.

    It ends where it may, `untrained_s` after its last unit, as long as nothing is `asked`.
    """

    paused: str | None = None
    idle_s = 0.0
    refused: str | None = None
    asked = False
    untrained_s = 0.0

    def __init__(self) -> None:
        self.requests = self
        self.background = nullcontext()
        self.lost, self.woken = asyncio.Event(), asyncio.Event()
        self.runs, self.deaths, self.retired, self.settled = 0, 0, 0, 0

    async def refuse(self, why: str) -> None:
        self.refused = why

    def accept(self) -> None:
        self.paused = self.refused = None

    async def run(self, report: Any, may_end: Callable[[float], bool]) -> None:
        self.runs += 1
        if self.deaths:
            self.deaths -= 1
        else:
            await report("", done=True)
            while not self.lost.is_set():
                if not self.asked and may_end(self.untrained_s):
                    return
                await asyncio.sleep(0)
            self.lost.clear()
        raise TrainerLostError("rank 0 died")

    async def retire(self) -> None:
        self.retired += 1

    async def settle(self) -> None:
        self.settled += 1

    def ask(self) -> None:
        self.asked = True
        self.woken.set()


async def _nothing(*_: object) -> None:
    pass


class Replayed(ScriptedSamplers):
    replayed = True
    fleet = SimpleNamespace(supervise=_nothing)

    def await_replay(self) -> None:
        self.replayed = False

    def replay_ended(self) -> None:
        self.replayed = True

    def drop_weights(self) -> bool:
        return False

    async def equip(self, newcomer: object) -> None:
        pass


class Case:
    def __init__(
        self,
        store: Store,
        bell: Doorbell,
        *failures: Exception,
        others: tuple[str, ...],
        idle_s: float | None = None,
        trained: bool = True,
        room: BaseRoom | None = None,
    ) -> None:
        """`others`: base models beside this one, which serve."""
        self.processes, self.driver = Scripted(*failures), Driver()
        self.samplers = Replayed(["b"])
        serving = SimpleNamespace(size=1, replicas=1)
        fleets = cast(Any, dict.fromkeys(("b", *others), serving))
        on_demand = ["b"] if idle_s is not None else []
        starting = {"b": self.processes.parts}
        self.statuses = BaseStatuses(EngineStatus(store, bell), fleets, ["b"] * trained, starting, on_demand)
        self.samplers.gate.asked = self.driver.woken
        runtime = SimpleNamespace(
            facts=self.samplers.facts,
            trainer=SimpleNamespace(watch=_nothing, broken=None),
            samplers=self.samplers,
            placement=SEPARATE,
            processes=self.processes,
            idle_s=idle_s,
        )
        driver = cast(Any, self.driver) if trained else None
        self.supervisor = BaseSupervisor(cast(Any, runtime), driver, self.statuses, room or BaseRoom())


@asynccontextmanager
async def running(case: Case) -> AsyncIterator["asyncio.Task[None]"]:
    resumed = asyncio.get_running_loop().create_future()
    resumed.set_result(None)
    task = asyncio.create_task(case.supervisor.run(resumed))
    yield task
    task.cancel()
    await asyncio.wait((task,))


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_supervisor, "PAUSES_S", (0.01,))


async def test_the_only_base_model_ends_the_engine(store: Store, bell: Doorbell) -> None:
    case = Case(store, bell, SamplerError(LOG), others=())
    case.processes.go_on.release()
    async with running(case) as task:
        with pytest.raises(SamplerError) as raised:
            await task
    assert raised.value.args == (LOG,)


@pytest.mark.parametrize("again", [TrainerError("ValueError: damaged"), StartupError("ValueError: damaged")])
async def test_one_that_does_not_start_fails_its_requests_alone_and_is_tried_again(
    store: Store, bell: Doorbell, again: Exception
) -> None:
    case = Case(store, bell, SamplerError(LOG), again, others=("a",))
    processes, gate = case.processes, case.samplers.gate
    async with running(case) as task:
        await until(lambda: processes.starts == 1)
        assert gate.reason == case.driver.paused == "base model b is being started"
        sample = asyncio.create_task(_sample(gate))
        processes.go_on.release()
        await until(lambda: processes.starts == 2)
        assert not case.statuses.others_may_serve("a")
        assert (case.driver.refused, sample.done()) == (None, False), "another try may help"
        processes.go_on.release()
        await until(lambda: processes.starts == 3 and case.driver.refused)
        told = f"{WHY}; other base models are unaffected"
        with pytest.raises(SamplerError, match=told):
            await sample
        with pytest.raises(SamplerError, match=told):
            await _sample(gate)
        assert case.driver.refused == WHY
        assert processes.ends == 2
        processes.go_on.release()
        assert not case.samplers.replayed
        await until(lambda: gate.reason is None and case.samplers.replayed)
        await _sample(gate)
        assert case.driver.paused is case.driver.refused is None
        assert case.statuses.others_may_serve("a")
        assert not task.done()
    assert processes.ends == 2


async def test_one_that_does_not_start_releases_models_that_are_due(store: Store, bell: Doorbell) -> None:
    case = Case(store, bell, *[SamplerError(LOG)] * 2, others=("a",))
    async with running(case):
        for number in (1, 2):
            case.processes.go_on.release()
            await until(lambda number=number: case.driver.retired == number)  # type: ignore[misc]


async def test_requests_are_told_how_far_a_rebuild_is(store: Store, bell: Doorbell) -> None:
    """Also while other base models serve."""
    case = Case(store, bell, others=("a",))
    await case.supervisor._report_rebuild("the trainer is restarted: '/srv/weights/b' is damaged")
    assert case.driver.paused == "base model b: the trainer is restarted: …/b is damaged"
    await case.supervisor._report_rebuild("", done=True)
    assert case.driver.paused is None


async def test_requests_wait_for_one_whose_weights_are_on_their_way(store: Store, bell: Doorbell) -> None:
    """As those that a server accepted, which starts again without its cache of the hub."""
    case = Case(store, bell, *(WeightsAwayError("its weights come") for _ in range(3)), others=("a",))
    processes, gate = case.processes, case.samplers.gate
    async with running(case):
        sample = asyncio.create_task(_sample(gate))
        for number in range(3):
            await until(lambda number=number: processes.starts == number + 1)
            processes.go_on.release()
        await until(lambda: processes.starts == 4)
        assert gate.reason == case.driver.paused == "base model b does not start: its weights come"
        assert (case.driver.refused, sample.done()) == (None, False)
        processes.go_on.release()
        await sample


async def test_requests_are_not_told_where_the_servers_files_lie(store: Store, bell: Doorbell) -> None:
    damaged = StartupError("'/srv/weights/b.safetensors' is not a whole safetensors file")
    case = Case(store, bell, damaged, damaged, others=("a",))
    for _ in range(2):
        case.processes.go_on.release()
    async with running(case):
        await until(lambda: case.driver.refused)
        told = "base model b does not start: …/b.safetensors is not a whole safetensors file"
        assert case.driver.refused == told
        with pytest.raises(SamplerError, match=told):
            await _sample(case.samplers.gate)
        assert str(damaged) in state(case)[1], "the administrator is"


async def test_lost_ranks_end_the_only_base_model(store: Store, bell: Doorbell) -> None:
    case = Case(store, bell, others=())
    case.processes.go_on.release()
    case.driver.lost.set()
    async with running(case) as task:
        with pytest.raises(TrainerLostError):
            await task


async def test_one_whose_ranks_are_lost_is_started_again_by_itself(store: Store, bell: Doorbell) -> None:
    """Its requests wait for the first new start, and fail once its ranks are lost again."""
    case = Case(store, bell, others=("a",))
    processes, driver, gate = case.processes, case.driver, case.samplers.gate
    for _ in range(2):
        processes.go_on.release()
    async with running(case) as task:
        await until(lambda: driver.runs == 1 and gate.reason is None)
        driver.lost.set()
        await until(lambda: driver.runs == 2)
        assert (driver.refused, gate.reason, processes.ends) == (None, None, 1)
        driver.deaths = 1
        driver.lost.set()
        await until(lambda: processes.starts == 3)
        assert gate.reason == driver.paused == "base model b is being started"
        assert not case.samplers.replayed
        assert driver.refused is None, "its models were back"
        processes.go_on.release()
        await until(lambda: driver.refused == "base model b does not start: rank 0 died")
        assert gate.reason == f"{driver.refused}; other base models are unaffected"
        processes.go_on.release()
        await until(lambda: driver.runs == 4 and driver.refused is None and case.samplers.replayed)
        assert not task.done()


def state(case: Case) -> tuple[str, str]:
    return case.statuses._bases()["b"]


STARTING = "base model b is being started"
STOPPED = "base model b is stopped: it starts when it is asked for"


async def test_one_on_demand_starts_with_a_request_and_stops_once_it_is_idle(
    store: Store, bell: Doorbell
) -> None:
    case = Case(store, bell, others=("a",), idle_s=60.0)
    processes, driver, gate = case.processes, case.driver, case.samplers.gate
    async with running(case) as task:
        await until(lambda: driver.retired)
        assert (processes.starts, state(case)[0]) == (0, "stopped")
        assert gate.reason == driver.paused == STOPPED
        driver.woken.set()  # as when a session ends
        await until(lambda: driver.retired == 2)
        assert processes.starts == 0, "nobody needs ranks"
        driver.ask()
        await until(lambda: processes.starts == 1)
        assert gate.reason == driver.paused == STARTING
        assert state(case) == ("starting", "waiting for sampler of b")
        processes.go_on.release()
        await until(lambda: gate.reason is None and case.samplers.replayed)
        assert state(case)[0] == "ready"
        driver.untrained_s, gate._left_at = 61.0, gate._left_at - 61.0
        async with gate.passage():
            driver.asked = False
            await _let_run()
            assert (processes.ends, gate.reason) == (0, None), "a sample is under way"
        gate._left_at -= 61.0
        await until(lambda: driver.retired > 2)
        assert (processes.ends, driver.settled, state(case)[0]) == (1, 1, "stopped")
        assert gate.reason == driver.paused == STOPPED
        assert not case.samplers.replayed
        driver.ask()
        processes.go_on.release()
        await until(lambda: gate.reason is None)
        assert (processes.starts, driver.runs) == (2, 2)
        assert not task.done()


async def test_one_that_is_only_sampled_starts_and_stops_as_its_samples_come(
    store: Store, bell: Doorbell
) -> None:
    case = Case(store, bell, others=("a",), idle_s=0.001, trained=False)
    processes, gate = case.processes, case.samplers.gate
    async with running(case) as task:
        for number in (1, 2):
            await until(lambda: state(case)[0] == "stopped")
            sample = asyncio.create_task(_sample(gate))
            await until(lambda number=number: processes.starts == number)  # type: ignore[misc]
            processes.go_on.release()
            await sample
            await until(lambda number=number: processes.ends == number)  # type: ignore[misc]
        assert not task.done()


async def _sample(gate: SampleGate) -> None:
    async with gate.passage():
        pass


async def _let_run() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_request_that_comes_while_it_stops_waits_for_the_next_start(
    store: Store, bell: Doorbell, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(store, bell, others=("a",), idle_s=0.0)
    processes, driver, gate = case.processes, case.driver, case.samplers.gate
    ending, ended = asyncio.Event(), asyncio.Event()

    async def end() -> None:
        ending.set()
        await ended.wait()

    monkeypatch.setattr(processes, "end", end)
    async with running(case):
        driver.ask()
        processes.go_on.release()
        await until(lambda: driver.runs)
        driver.asked = False
        await ending.wait()
        sample = asyncio.create_task(_sample(gate))
        await _let_run()
        assert not sample.done()
        ended.set()
        processes.go_on.release()
        await sample
        assert processes.starts == 2


async def test_one_on_demand_that_does_not_start_is_tried_again_and_rests_once_it_was_up(
    store: Store, bell: Doorbell
) -> None:
    case = Case(store, bell, SamplerError(LOG), others=("a",), idle_s=0.001, trained=False)
    processes, gate = case.processes, case.samplers.gate
    async with running(case):
        sample = asyncio.create_task(_sample(gate))
        await until(lambda: processes.starts == 1)
        processes.go_on.release()
        await until(lambda: state(case) == ("failed", WHY))
        await until(lambda: processes.starts == 2)
        assert not sample.done()
        processes.go_on.release()
        await sample
        await until(lambda: not gate.asked.is_set())  # it rests
        assert (processes.starts, processes.ends) == (2, 2)
        processes.failures.append(SamplerError(LOG))
        sample = asyncio.create_task(_sample(gate))
        processes.go_on.release()
        await until(lambda: processes.starts == 4)
        assert not sample.done(), "failures before the last run count no more"
        processes.go_on.release()
        await sample


async def test_one_on_demand_that_does_not_start_is_not_tried_again_without_demand(
    store: Store, bell: Doorbell
) -> None:
    case = Case(store, bell, *[SamplerError(LOG)] * 3, others=("a",), idle_s=60.0)
    processes, driver, gate = case.processes, case.driver, case.samplers.gate
    for _ in range(4):
        processes.go_on.release()
    async with running(case) as task:
        await until(lambda: driver.retired)
        driver.ask()
        await until(lambda: processes.ends == 2 and driver.refused == WHY)
        driver.asked = False  # as refused requests do not wait
        await until(lambda: gate.reason == driver.paused == STOPPED)
        assert (driver.refused, state(case)) == (None, ("failed", WHY))
        await _let_run()
        assert processes.starts == 2
        with pytest.raises(SamplerError, match=WHY):  # it starts it, waits, and fails with it
            await _sample(gate)
        await until(lambda: gate.reason == STOPPED)
        assert (processes.starts, processes.ends) == (3, 3)
        await _sample(gate)
        assert processes.starts == 4
        assert not task.done()


async def test_it_starts_and_stops_as_an_administrator_asks_and_no_request_is_cut(
    store: Store, bell: Doorbell
) -> None:
    case = Case(store, bell, others=("a",), idle_s=60.0)
    processes, driver, gate, base = case.processes, case.driver, case.samplers.gate, case.supervisor
    async with running(case) as task:
        await until(lambda: driver.retired)
        assert (base.ask_stop(), base.idle_s) == (STOPPED, None)
        for number in (1, 2):
            assert base.ask_start() == STARTING
            await until(lambda number=number: processes.starts == number)  # type: ignore[misc]
            processes.go_on.release()
            await until(lambda: gate.reason is None)
            assert (state(case)[0], base.ask_start()) == ("ready", "base model b runs")
            async with gate.passage():
                assert base.ask_stop() == "base model b stops once no request waits or runs"
                await _let_run()
                assert (gate.reason, processes.ends, base.idle_s) == (None, number - 1, 0.0)
            await until(lambda: state(case)[0] == "stopped")
            assert (processes.ends, gate.reason) == (number, STOPPED)
        driver.ask()
        processes.go_on.release()
        await until(lambda: gate.reason is None)
        driver.asked = False
        await _let_run()
        assert processes.ends == 2, "what was asked before is done"
        assert not task.done()


async def test_a_start_takes_back_that_it_was_to_stop(store: Store, bell: Doorbell) -> None:
    case = Case(store, bell, others=("a",), idle_s=60.0, trained=False)
    processes, gate, base = case.processes, case.samplers.gate, case.supervisor
    async with running(case):
        base.ask_start()
        processes.go_on.release()
        await until(lambda: gate.reason is None)
        async with gate.passage():
            base.ask_stop()
            base.ask_start()
        await _let_run()
        assert (processes.ends, gate.reason) == (0, None)


async def test_a_start_that_an_administrator_asked_for_is_tried_once(
    store: Store, bell: Doorbell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_supervisor, "PAUSES_S", (0.0,))
    case = Case(store, bell, SamplerError(LOG), others=("a",), idle_s=60.0)
    case.processes.go_on.release()
    async with running(case):
        await until(lambda: case.driver.retired)
        case.supervisor.ask_start()
        await until(lambda: case.driver.retired > 2)
        assert (state(case), case.processes.starts) == (("failed", WHY), 1)


async def test_a_stop_that_was_asked_for_after_a_failed_start_ends_no_later_run(
    store: Store, bell: Doorbell
) -> None:
    case = Case(store, bell, SamplerError(LOG), others=("a",), idle_s=60.0)
    async with running(case):
        case.driver.ask()
        case.processes.go_on.release()
        await until(lambda: state(case) == ("failed", WHY))
        assert case.supervisor.ask_stop() == STOPPED
        case.processes.go_on.release()
        await until(lambda: case.samplers.gate.reason is None)
        case.driver.asked = False
        await _let_run()
        assert (case.processes.ends, state(case)[0]) == (1, "ready")


async def test_a_stop_that_was_asked_for_during_the_start_comes_once_nothing_needs_it(
    store: Store, bell: Doorbell
) -> None:
    case = Case(store, bell, others=("a",), idle_s=60.0)
    async with running(case):
        await until(lambda: case.driver.retired)
        case.supervisor.ask_start()
        await until(lambda: case.processes.starts == 1)
        assert case.supervisor.ask_stop() == "base model b stops once no request waits or runs"
        assert case.supervisor.idle_s is None
        case.processes.go_on.release()
        await until(lambda: case.processes.ends == 1 and state(case)[0] == "stopped")


async def test_one_that_lacks_gpus_waits_until_another_has_been_idle_and_stopped(
    store: Store, bell: Doorbell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_room, "ROOM_CHECK_S", 0.01)
    room = BaseRoom(2, {"b": 2, "c": 1})
    case = Case(store, bell, others=("a",), idle_s=3600.0, room=room)
    processes, driver, gate = case.processes, case.driver, case.samplers.gate
    told: list[str] = []

    async def hear(why: str) -> None:
        told.append(why)

    async with running(case):
        await room.enter("c", lambda: 5.0, hear, lambda: True)
        driver.ask()
        await until(lambda: state(case) == ("stopped", "it waits for 2 GPUs of c"))
        assert gate.reason == driver.paused == "base model b is stopped: it waits for 2 GPUs of c"
        assert (room.wants("c"), processes.starts, told) == (True, 0, [])
        assert case.statuses.others_may_serve("a") is case.statuses.ready
        driver.asked = False  # as its client has cancelled it
        await until(lambda: state(case) == ("stopped", "it starts when it is asked for"))
        assert (gate.reason, room.wants("c")) == (STOPPED, False)
        driver.ask()
        await until(lambda: room.wants("c"))
        room.leave("c")
        processes.go_on.release()
        await until(lambda: gate.reason is None)
        assert not room.wants("c")
        waiting = asyncio.create_task(room.enter("c", lambda: 0.0, hear, lambda: True))
        await until(lambda: told)
        assert told[0] == "it waits for 1 GPU of b"
        driver.untrained_s, gate._left_at = 59.0, gate._left_at - 61.0
        driver.asked = False
        await _let_run()
        assert (processes.ends, waiting.done()) == (0, False), "it was used a moment ago"
        driver.untrained_s = 61.0
        await waiting
        assert (processes.ends, state(case)[0]) == (1, "stopped")

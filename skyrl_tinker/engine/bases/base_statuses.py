"""Status of the engine, composed of those of its base models: of their starts, trainers and samplers."""

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType

from sqlalchemy.exc import OperationalError

from skyrl_tinker.engine.outbox import persistently
from skyrl_tinker.engine.sampler.fleet import Fleet
from skyrl_tinker.engine.status import EnginePhase, EngineStatus, PhaseDetail

NO_PARTS: Mapping[str, Collection[str]] = MappingProxyType({})
GONE = "no sampler is running: they are being restarted"
CLEAN_UP = "clean-up"
"""Part that none serves without."""
_CHECK = "the comparison of trainer and sampler"
_BACK = "models are brought back"
ON_DEMAND = "it starts when it is asked for"
_log = logging.getLogger(__name__)


class _Phase(Enum):
    STOPPED = auto()
    STARTING = auto()
    FAILED = auto()
    RETURNING = auto()  # the trainer brings models back
    UP = auto()


@dataclass(frozen=True, slots=True)
class _BaseState:
    """`detail`: why it failed, or of its models; `parts`: those that its start waits for."""

    phase: _Phase
    detail: str = ""
    parts: Collection[str] = ()


_STOPPED = _BaseState(_Phase.STOPPED, ON_DEMAND)


class BaseStatuses:
    """The engine takes work while any base model serves: requests of others wait.

    At its start it waits until each base model serves, has failed or is on demand; one must serve.
    """

    def __init__(
        self,
        status: EngineStatus,
        fleets: Mapping[str, Fleet | None],
        trained: Collection[str] = (),
        starting: Mapping[str, Collection[str]] = NO_PARTS,
        on_demand: Collection[str] = (),
    ) -> None:
        """`fleets`: by base model, None for one that is not sampled; `trained`: those that are trained.

        `starting`: parts that the start of each waits for; there is also that of CLEAN_UP. `on_demand`: those
        that are stopped at first.
        """
        self._status = status
        self._fleets = fleets
        self._trained = trained
        self._states = {name: self._started(name) for name in fleets}
        parts = {**starting, CLEAN_UP: [CLEAN_UP]} if starting else {}
        self._states |= {name: _BaseState(_Phase.STARTING, parts=each) for name, each in parts.items()}
        self._states |= dict.fromkeys(on_demand, _STOPPED)
        self._from_rest = {*on_demand}  # were stopped, and neither served nor failed since
        self._served: set[str] = set()  # base models that have been ready
        self.ready = False  # since the start
        self._settle()

    def expected_replicas(self, base_model: str) -> int:
        """Count the replicas that should serve: none of a base model that is stopped or being started."""
        return sum(fleet.replicas for name, fleet in self._awaited() if name == base_model)

    def others_may_serve(self, base_model: str) -> bool:
        """Return whether another base model serves, or is being started.

        Since the engine has been ready also whether one is stopped: it starts on demand.
        """
        away = {_Phase.FAILED} if self.ready else {_Phase.FAILED, _Phase.STOPPED}
        phases = (self._states[name].phase for name in self._fleets if name != base_model)
        return any(phase not in away for phase in phases)

    async def starting(self, base_model: str, parts: Collection[str]) -> None:
        """Report the parts that a start still waits for; one that has failed is so until it has started."""
        if not self._is(_Phase.FAILED, base_model):
            await self._tell(base_model, _BaseState(_Phase.STARTING, parts=parts))

    async def failed(self, base_model: str, why: str) -> None:
        """Report that a base model does not start, or that its ranks are lost."""
        self._from_rest.discard(base_model)
        await self._tell(base_model, _BaseState(_Phase.FAILED, why))

    async def stopped(self, base_model: str) -> None:
        """Report that a base model has stopped, and starts on demand."""
        self._from_rest.add(base_model)
        self._served.discard(base_model)
        await self._tell(base_model, _STOPPED)

    async def waits(self, base_model: str, why: str) -> None:
        """Report that a base model is stopped and was asked for, and why it does not start yet."""
        state = _BaseState(_Phase.STOPPED, why)
        if not self._is(_Phase.FAILED, base_model) and self._states[base_model] != state:
            await self._tell(base_model, state)

    async def started(self, base_model: str) -> None:
        """Report that all parts of a base model are there."""
        await self._tell(base_model, self._started(base_model))

    async def rebuild(self, base_model: str, detail: str, *, done: bool = False) -> None:
        """Report the progress of bringing models back. `done`: all that do not sleep are back."""
        await self._tell(base_model, _BaseState(_Phase.UP if done else _Phase.RETURNING, detail))

    async def report(self) -> None:
        """Report the replicas that serve."""
        self._settle()
        try:
            await self._status.report(*self._state(), self._bases())
        except OperationalError as error:  # a short failure of the database must not end the engine
            _log.warning("the status could not be stored: %s", error)

    async def _tell(self, base_model: str, state: _BaseState) -> None:
        self._states[base_model] = state
        self._settle()
        await persistently(lambda: self._status.report(*self._state(), self._bases()))

    def _started(self, base_model: str) -> _BaseState:
        return _BaseState(_Phase.RETURNING if base_model in self._trained else _Phase.UP)

    def _is(self, phase: _Phase, base_model: str) -> bool:
        return self._states[base_model].phase is phase

    def _settle(self) -> None:
        """Note which base models serve for the first time."""
        up = {name for name in self._fleets if self._is(_Phase.UP, name)}
        self._served |= up
        self._from_rest -= up
        busy = (_Phase.STARTING, _Phase.RETURNING)
        if not self.ready and up and not any(state.phase in busy for state in self._states.values()):
            self.ready = True
            _log.info("ready")

    def _state(self) -> PhaseDetail:
        absent = "; ".join(self._absences())
        if not self.ready:
            return "starting", "; ".join(filter(None, [self._missing(), absent]))
        if not any(state == "ready" for state, _ in self._bases().values()):
            return "restarting", absent or f"{GONE}; models are unaffected"
        details = "; ".join([*filter(None, [absent]), *self._shortages()])
        up = (state for state in self._states.values() if state.phase is _Phase.UP)
        return "ready", details or next((state.detail for state in up if state.detail), "")

    def _awaited(self) -> Iterator[tuple[str, Fleet]]:
        """Yield the fleets of the base models that are sampled, without those stopped or being started."""
        away = (_Phase.STOPPED, _Phase.STARTING)
        for name, fleet in self._fleets.items():
            if fleet is not None and self._states[name].phase not in away:
                yield name, fleet

    def _bases(self) -> dict[str, PhaseDetail]:
        return {name: self._of(name) for name in self._fleets}

    def _of(self, name: str) -> PhaseDetail:
        state, fleet = self._states[name], self._fleets[name]
        back: EnginePhase = "restarting" if name in self._served else "starting"
        match state.phase:
            case _Phase.STOPPED:
                return "stopped", state.detail
            case _Phase.STARTING:
                return "starting", _waiting_for(state.parts)
            case _Phase.FAILED:
                return "failed", state.detail
            case _Phase.RETURNING:
                return back, state.detail or _BACK
        if fleet is not None and not fleet.size:
            return "restarting", GONE
        if fleet is not None and fleet.size < fleet.replicas:
            return "ready", f"{fleet.size} of {fleet.replicas} replicas serve"
        return "ready", state.detail

    def _missing(self) -> str:
        """Return the parts that the engine's start waits for."""
        starting = [state.parts for state in self._states.values() if state.phase is _Phase.STARTING]
        return _waiting_for([part for parts in starting for part in parts]) if starting else ""

    def _absences(self) -> Iterator[str]:
        for name, state in self._states.items():
            if state.phase is _Phase.FAILED:
                yield state.detail
            elif state.phase is not _Phase.RETURNING or name in self._from_rest:
                continue
            elif len(self._fleets) == 1:
                yield state.detail or "waiting for models"
            else:
                yield f"{name}: {state.detail or _BACK}"

    def _shortages(self) -> Iterator[str]:
        for name, fleet in self._awaited():
            whose = f" of {name}" if len(self._fleets) > 1 else ""
            if fleet.size < fleet.replicas and not self._is(_Phase.FAILED, name):
                yield f"{fleet.size} of {fleet.replicas} replicas{whose} serve"


def _waiting_for(parts: Collection[str]) -> str:
    return f"waiting for {', '.join(sorted(parts)) or _CHECK}"

"""Status of the engine, composed of those of its base models: of their starts, trainers and samplers."""

import logging
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType

from sqlalchemy.exc import OperationalError

from skyrl_tinker.engine.outbox import persistently
from skyrl_tinker.engine.sampler.fleet import Fleet
from skyrl_tinker.engine.status import EnginePhase, EngineStatus, PhaseDetail
from skyrl_tinker.protocol.queue_views import ASLEEP

NO_PARTS: Mapping[str, Collection[str]] = MappingProxyType({})
GONE = "no sampler is running: they are being restarted"
CLEAN_UP = "clean-up"
"""Part that none serves without."""
_CHECK = "the comparison of trainer and sampler"
_BACK = "models are brought back"
_log = logging.getLogger(__name__)


class BaseStatuses:
    """The engine takes work while any base model has a replica, and any trainer: requests of others wait.

    At its start it waits until each base model serves, or does not start or is lost; one must serve.
    """

    def __init__(
        self,
        status: EngineStatus,
        fleets: Mapping[str, Fleet | None],
        trained: Collection[str] = (),
        starting: Mapping[str, Collection[str]] = NO_PARTS,
    ) -> None:
        """`fleets`: by base model, None for one that is not sampled; `trained`: those that are trained.

        `starting`: parts that the start of each waits for; there is also that of CLEAN_UP.
        """
        self._status = status
        self._fleets = fleets
        self._trained = trained
        self._starting: dict[str, Collection[str]] = dict(starting)
        if starting:
            self._starting[CLEAN_UP] = [CLEAN_UP]
        self._failed: dict[str, str] = {}  # base models that do not start, with the reason
        self._away = dict.fromkeys(trained, "")  # trainers that bring models back, with their progress
        self._asleep: set[str] = set()
        self._lost: set[str] = set()  # of those away
        self._served: set[str] = set()  # base models that have been ready
        self.ready = False  # since the start
        self._settle()

    def others_may_serve(self, base_model: str) -> bool:
        """Return whether another base model serves, or may still start."""
        return bool(self._fleets.keys() - {base_model} - self._failed.keys())

    async def starting(self, base_model: str, parts: Collection[str]) -> None:
        """Report the parts that a start still waits for."""
        self._starting[base_model] = parts
        await self._tell()

    async def failed(self, base_model: str, why: str) -> None:
        """Report that a base model does not start."""
        self._failed[base_model] = why
        await self._tell()

    async def started(self, base_model: str) -> None:
        """Report that all parts of a base model are there."""
        self._starting.pop(base_model, None)
        self._failed.pop(base_model, None)
        await self._tell()

    async def rebuild(self, base_model: str, detail: str, *, done: bool = False, lost: bool = False) -> None:
        """Report the progress of bringing models back. `done`: all that do not sleep are back."""
        self._lost |= {base_model} if lost else set()
        self._asleep.discard(base_model)
        if done:
            self._away.pop(base_model, None)
            self._lost.discard(base_model)
            self._asleep |= {base_model} if detail else set()
        else:
            self._away[base_model] = detail
        await self._tell()

    async def report(self) -> None:
        """Report the replicas that serve."""
        self._settle()
        try:
            await self._status.report(*self._state(), self._bases())
        except OperationalError as error:  # a short failure of the database must not end the engine
            _log.warning("the status could not be stored: %s", error)

    async def _tell(self) -> None:
        self._settle()
        await persistently(lambda: self._status.report(*self._state(), self._bases()))

    def _settle(self) -> None:
        """Note which base models serve for the first time."""
        down = self._failed.keys() | self._lost
        busy = (self._starting.keys() | self._away.keys()) - down
        self._served |= self._fleets.keys() - down - busy
        if not self.ready and not busy and self._fleets.keys() - down:
            self.ready = True
            _log.info("ready")

    def _state(self) -> PhaseDetail:
        away = "; ".join(self._absences())
        if not self.ready:
            return "starting", "; ".join(filter(None, [self._missing(), away]))
        if self._trained and not {*self._trained} - self._away.keys() - self._failed.keys():
            return "restarting", away
        sampled = [fleet for fleet in self._fleets.values() if fleet is not None]
        if sampled and not any(fleet.size for fleet in sampled):
            return "restarting", f"{GONE}; models are unaffected"
        details = [*filter(None, [away]), *self._shortages()]
        return "ready", "; ".join(details) or (ASLEEP if self._asleep else "")

    def _bases(self) -> dict[str, PhaseDetail]:
        return {name: self._of(name) for name in self._fleets}

    def _of(self, name: str) -> PhaseDetail:
        fleet = self._fleets[name]
        back: EnginePhase = "restarting" if name in self._served else "starting"
        if name in self._failed:
            return "failed", self._failed[name]
        if name in self._starting:
            return "starting", _waiting_for(self._starting[name])
        if name in self._away:
            return "failed" if name in self._lost else back, self._away[name] or _BACK
        if fleet is not None and not fleet.size:
            return "restarting", GONE
        if fleet is not None and fleet.size < fleet.replicas:
            return "ready", f"{fleet.size} of {fleet.replicas} replicas serve"
        return "ready", ASLEEP if name in self._asleep else ""

    def _missing(self) -> str:
        """Return the parts that the engine's start waits for."""
        waiting = {name: parts for name, parts in self._starting.items() if name not in self._failed}
        return _waiting_for([part for parts in waiting.values() for part in parts]) if waiting else ""

    def _absences(self) -> Iterator[str]:
        yield from self._failed.values()
        for name, detail in self._away.items():
            if name not in self._failed and name not in self._starting:
                yield (
                    detail or "waiting for models" if len(self._fleets) == 1 else f"{name}: {detail or _BACK}"
                )

    def _shortages(self) -> Iterator[str]:
        for name, fleet in self._fleets.items():
            whose = f" of {name}" if len(self._fleets) > 1 else ""
            if fleet is not None and fleet.size < fleet.replicas and name not in self._failed:
                yield f"{fleet.size} of {fleet.replicas} replicas{whose} serve"


def _waiting_for(parts: Collection[str]) -> str:
    return f"waiting for {', '.join(sorted(parts)) or _CHECK}"

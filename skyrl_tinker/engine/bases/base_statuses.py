"""Status of the engine, composed of those of its base models: of their trainers, and of their samplers."""

import logging
from collections.abc import Collection, Iterator, Mapping

from sqlalchemy.exc import OperationalError

from skyrl_tinker.engine.outbox import persistently
from skyrl_tinker.engine.sampler.fleet import Fleet
from skyrl_tinker.engine.status import EnginePhase, EngineStatus
from skyrl_tinker.protocol.queue_views import ASLEEP

_log = logging.getLogger(__name__)


class BaseStatuses:
    """The engine takes work while any base model has a replica, and any trainer: requests of others wait.

    At its start it waits until the models of all trainers are back that are not lost.
    """

    def __init__(
        self, status: EngineStatus, fleets: Mapping[str, Fleet], trained: Collection[str] = ()
    ) -> None:
        """`fleets`: by base model; `trained`: those of them that are trained."""
        self._status = status
        self._fleets = fleets
        self._trained = trained
        self._away = dict.fromkeys(trained, "")  # trainers that bring models back, with their progress
        self._asleep: set[str] = set()
        self._lost: set[str] = set()  # of those away
        self.ready = not trained  # since the start

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
        self.ready = self.ready or (self._away.keys() <= self._lost < {*self._trained})
        await persistently(lambda: self._status.report(*self._state()))

    async def report(self) -> None:
        """Report the replicas that serve."""
        try:
            await self._status.report(*self._state())
        except OperationalError as error:  # a short failure of the database must not end the engine
            _log.warning("the status could not be stored: %s", error)

    def _state(self) -> tuple[EnginePhase, str]:
        away = "; ".join(self._rebuilds())
        if not self.ready:
            return "starting", away
        if self._trained and len(self._away) == len(self._trained):
            return "restarting", away
        if not any(fleet.size for fleet in self._fleets.values()):
            return "restarting", "no sampler is running: they are being restarted; models are unaffected"
        details = [*filter(None, [away]), *self._shortages()]
        return "ready", "; ".join(details) or (ASLEEP if self._asleep else "")

    def _rebuilds(self) -> Iterator[str]:
        for name, detail in self._away.items():
            yield detail if len(self._fleets) == 1 else f"{name}: {detail or 'models are brought back'}"

    def _shortages(self) -> Iterator[str]:
        for name, fleet in self._fleets.items():
            whose = f" of {name}" if len(self._fleets) > 1 else ""
            if fleet.size < fleet.replicas:
                yield f"{fleet.size} of {fleet.replicas} replicas{whose} serve"

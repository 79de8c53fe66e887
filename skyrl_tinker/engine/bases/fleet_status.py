"""Status of the samplers of all base models: how many replicas of each serve."""

import logging
from collections.abc import Iterator, Mapping

from sqlalchemy.exc import OperationalError

from skyrl_tinker.engine.sampler.fleet import Fleet
from skyrl_tinker.engine.status import EngineStatus

_log = logging.getLogger(__name__)


class FleetStatus:
    """The engine takes work while any base model has a replica: requests of the others wait."""

    def __init__(self, status: EngineStatus, fleets: Mapping[str, Fleet]) -> None:
        """`fleets`: by base model."""
        self._status = status
        self._fleets = fleets

    async def report(self) -> None:
        try:
            if any(fleet.size for fleet in self._fleets.values()):
                await self._status.report("ready", "; ".join(self._shortages()))
            else:
                detail = "no sampler is running: they are being restarted; models are unaffected"
                await self._status.report("restarting", detail)
        except OperationalError as error:  # a short failure of the database must not end the engine
            _log.warning("the status could not be stored: %s", error)

    def _shortages(self) -> Iterator[str]:
        for name, fleet in self._fleets.items():
            whose = f" of {name}" if len(self._fleets) > 1 else ""
            if fleet.size < fleet.replicas:
                yield f"{fleet.size} of {fleet.replicas} replicas{whose} serve"

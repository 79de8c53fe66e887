"""Starts and stops of base models on demand, as an administrator asks, and how long each has been idle."""

from collections.abc import Sequence

from skyrl_tinker.engine.bases.base_supervisor import BaseSupervisor
from skyrl_tinker.protocol.schemas.console import ChangeBaseRequest


class BaseSwitch:
    def __init__(self, supervisors: Sequence[BaseSupervisor]) -> None:
        self._of = {each.name: each for each in supervisors}

    def change(self, asked: ChangeBaseRequest) -> str:
        """Start or stop a base model on demand, given by its canonical name; return what follows."""
        base = self._of[asked.base_model]
        return base.ask_start() if asked.action == "start" else base.ask_stop()

    def idle(self) -> dict[str, float]:
        """Return the seconds without requests of those on demand that run, by their names."""
        return {name: idle_s for name, each in self._of.items() if (idle_s := each.idle_s) is not None}

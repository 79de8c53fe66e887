"""Runtime of one base model: its trainer and samplers, and the processes behind them."""

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from skyrl_tinker.config import Settings
from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.engine.colocation.placement import Placement
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.storage.storage_port import Storage
from skyrl_tinker.training.trainer_group import TrainerGroup

ReportParts = Callable[[Collection[str]], Awaitable[None]]
"""Report the parts that a start still waits for."""


class Processes(Protocol):
    """Ranks, samplers and router of a base model."""

    @property
    def parts(self) -> Collection[str]:
        """Parts that a start waits for."""
        ...

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of ranks and sampling servers; empty where they may be on other hosts."""
        ...

    async def start(self, report: ReportParts) -> None:
        """Start them all, and wait for them. Raises SkyrlTinkerError; call `end` then."""
        ...

    async def check(self) -> None:
        """Compare their logprobs. Raises StartupError if these differ too much; call `end` then."""
        ...

    async def end(self) -> None:
        """End them in any state; they can be started again. Raises TrainerLostError when Ray is gone."""
        ...


@dataclass(frozen=True, slots=True)
class BaseRuntime:
    """Base model with its trainer and samplers, which work while its processes run.

    `settings`: its own. `trainer` None: it is sampled only; `samplers` None: trained only. `storage`: of
    checkpoints. `idle_s`: time without requests after which it stops, None for one that always runs.
    `size`: GPUs of the cluster, or on CPUs bytes of this host's memory, that it takes while it runs.
    """

    settings: Settings
    facts: BaseModelFacts
    trainer: TrainerGroup | None
    samplers: Samplers | None
    storage: Storage
    placement: Placement
    processes: Processes
    idle_s: float | None = None
    size: int = 0

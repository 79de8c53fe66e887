"""Output of `skyrl-tinker plan`: a table or JSON."""

import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

from skyrl_tinker import config
from skyrl_tinker.config import Settings
from skyrl_tinker.domain.units import GB, counted
from skyrl_tinker.server.capacity_plan import CapacityPlan
from skyrl_tinker.server.memory_estimate import HOST, SAMPLER, TRAINER, MemoryLine
from skyrl_tinker.server.start_plan import FurtherPlan

_SUMMED = (TRAINER, SAMPLER, HOST)
"""Places whose lines are taken at once."""
_FEW = 6
"""Most base models on demand of which the sets that run at once are listed: each more may double them."""


def as_json(
    found: CapacityPlan, placed: Settings, further: Sequence[FurtherPlan], gpus: int, serve: str
) -> str:
    """Write the plan of the first base model, and the settings and the memory of the further ones."""
    own = {name: each.model_dump(mode="json", exclude_none=True) for name, each in placed.bases.items()}
    plan = {"fits": found.problem is None, "serve": serve, **asdict(found), "bases": own}
    host_bytes = _Bases(placed, found, further, gpus).host_bytes
    memory = {"further": [asdict(each) for each in further], "host_bytes": host_bytes}
    return json.dumps(plan | memory, indent=1)


def as_table(
    found: CapacityPlan, placed: Settings, further: Sequence[FurtherPlan], gpus: int, serve: str
) -> str:
    """Return the plan as lines. `gpus`: of the first base model."""
    parts = []
    for place, group in groupby(found.lines, key=lambda line: line.place):
        lines = list(group)
        parts.append(f"\n{place}, GB")
        parts += [
            f"  {line.name:<52}{_size(line.bytes):>12}" + ("" if line.counted else "  not counted")
            for line in lines
        ]
        if place in _SUMMED:
            parts.append(f"  {'together':<52}{_size(_sum(lines, place)):>12}")
    if further:
        parts += _Bases(placed, found, further, gpus).table()
    parts.append("\nsettings")
    parts += [f"  {choice}" for choice in found.choices]
    if placed.samples:
        adapters = ", adapters by shared memory" if placed.max_lora_rank else ""
        parts.append(f"\nto the samplers\n  full parameters by {found.weights_by}{adapters}")
    parts.append(f"\ndoes not fit: {found.problem}" if found.problem else f"\nfits:\n  {serve}")
    return "\n".join(parts)


class _Bases:
    """All base models of a plan. Those on demand run at once as far as the GPUs for them suffice."""

    def __init__(
        self, placed: Settings, found: CapacityPlan, further: Sequence[FurtherPlan], gpus: int
    ) -> None:
        first = FurtherPlan(placed.base_model, on_demand=False, gpus=gpus, lines=found.lines)
        self._always = [first, *(each for each in further if not each.on_demand)]
        self._on_demand = [each for each in further if each.on_demand]
        self._shared = max((each.gpus for each in self._on_demand), default=0)

    def _sets_at_once(self) -> str:
        """Tell which sets of those on demand fit beside each other, and are in no larger one."""
        if len(self._on_demand) > _FEW:
            return "any that need no more together"
        places, found = range(len(self._on_demand)), list[set[int]]()
        for count in range(len(self._on_demand), 0, -1):
            for chosen in map(set, combinations(places, count)):
                fits = sum(self._on_demand[place].gpus for place in chosen) <= self._shared
                if fits and not any(chosen <= each for each in found):
                    found.append(chosen)
        sets = (", ".join(self._on_demand[place].name for place in sorted(each)) for each in found)
        return "; or ".join(sets)

    @property
    def host_bytes(self) -> float:
        """Bytes of host memory that they take at once, at most."""
        most = [0.0] * (self._shared + 1)  # of those on demand, by the GPUs that they may take
        for each in self._on_demand:
            size, own = _sum(each.lines, HOST), each.gpus
            most = [max(one, most[at - own] + size) if at >= own else one for at, one in enumerate(most)]
        return sum(_sum(each.lines, HOST) for each in self._always) + most[-1]

    def table(self) -> Iterator[str]:
        yield f"\n{'base models, GB':<40}{'GPUs':>8}{'each trainer':>16}{'each sampler':>16}{'host':>12}"
        for each in (*self._always, *self._on_demand):
            name = f"{each.name}, on demand" if each.on_demand else each.name
            sizes = [_sum(each.lines, place) for place in (TRAINER, SAMPLER, HOST)]
            trainer, sampler, host = (_size(size) if size else "-" for size in sizes)
            yield f"  {name:<38}{each.gpus:>8}{trainer:>16}{sampler:>16}{host:>12}"
        gpus = sum(each.gpus for each in self._always) + self._shared
        yield f"  {'at once, at most':<38}{gpus:>8}{'':>32}{_size(self.host_bytes):>12}"
        yield f"  always beside each other: {', '.join(each.name for each in self._always)}"
        if self._on_demand:
            room = counted(self._shared, "GPU")
            yield f"  of those on demand at once, on {room}: {self._sets_at_once()}"


def _sum(lines: Iterable[MemoryLine], place: str) -> float:
    return sum(line.bytes for line in lines if line.place == place and line.counted)


def serve_line(config_file: Path | None, given: Mapping[str, Any]) -> str:
    """Return the command that starts what was planned: the variables, the file and the options of the plan.

    The rest is planned again. Without database_url, in which a password may be.
    """
    names = config.variables()
    variables = (names[each] for each in Settings.model_fields.keys() & names.keys() - {"database_url"})
    prefix = [f"{each}={shlex.quote(os.environ[each])}" for each in sorted(variables)]
    file = ["--config", str(config_file)] if config_file else []
    return " ".join((*prefix, shlex.join(["skyrl-tinker", "serve", *file, *_options(given)])))


def _options(given: Mapping[str, Any]) -> Iterator[str]:
    """Return the options as they were given, None for one that was not."""
    for name, value in given.items():
        option = "also" if name == "bases" else name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{option}" if value else f"--no-{option}"
        elif value is not None:
            for each in value if isinstance(value, list) else [value]:
                yield from (f"--{option}", str(each))


def _size(size: float) -> str:
    return f"{size / GB:.2f}" if size >= GB / 100 else f"{size / GB:.6f}"

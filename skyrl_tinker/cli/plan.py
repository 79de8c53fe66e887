"""`skyrl-tinker plan`: what fits on given GPUs, as a table or JSON."""

import json
from dataclasses import asdict
from functools import cache
from itertools import groupby

from skyrl_tinker.config import Settings
from skyrl_tinker.domain.memory_costs import MemoryCosts
from skyrl_tinker.domain.units import GB
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.server import base_model
from skyrl_tinker.server.capacity_plan import MOST_TOKENS, CapacityPlan, Choice, Demand, make_plan


def plan(settings: Settings, demand: Demand) -> CapacityPlan:
    """Plan a server of that base model. Raises StartupError for one that cannot be served."""
    config, facts = base_model.read_config(settings)

    @cache
    def costs_of(ranks: int) -> MemoryCosts:
        from skyrl_tinker.training.memory import row_costs, row_profile  # they take torch and seconds

        training = row_profile.Training(config, "cuda", "bfloat16", LoraSpec(demand.rank, 0))
        with row_profile.fake_ranks(ranks) as group:
            return row_costs.measure_costs(training, max(demand.context, MOST_TOKENS), group)

    return make_plan(demand, facts, costs_of)


def as_json(found: CapacityPlan) -> str:
    return json.dumps({"fits": found.problem is None, **asdict(found)}, indent=1)


def as_table(found: CapacityPlan) -> str:
    parts = []
    for place, group in groupby(found.lines, key=lambda line: line.place):
        lines = list(group)
        parts.append(f"\n{place}, GB")
        parts += [
            f"  {line.name:<52}{_size(line.bytes):>12}" + ("" if line.counted else "  not counted")
            for line in lines
        ]
        if place.startswith("GPU"):
            parts.append(f"  {'together':<52}{_size(sum(line.bytes for line in lines if line.counted)):>12}")
    parts.append("\nsettings")
    parts += [f"  {_setting(choice):<52}{choice.reason}" for choice in found.choices]
    parts.append(f"\n{'does not fit: ' + found.problem if found.problem else 'fits'}")
    return "\n".join(parts)


def _size(size: float) -> str:
    return f"{size / GB:.2f}" if size >= GB / 100 else f"{size / GB:.6f}"


def _setting(choice: Choice) -> str:
    flag = f"--{choice.setting.replace('_', '-')}"
    if isinstance(choice.value, bool):
        return flag if choice.value else f"no {flag}"
    return f"{flag} {choice.value}"

"""Output of `skyrl-tinker plan`: a table or JSON."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from itertools import chain, groupby

from skyrl_tinker.config import BaseOverrides, Settings
from skyrl_tinker.domain.units import GB
from skyrl_tinker.server.capacity_plan import CapacityPlan


def as_json(found: CapacityPlan, settings: Settings, bases: Mapping[str, BaseOverrides]) -> str:
    """Write the plan of the first base model, and the settings of the further ones."""
    own = {name: each.model_dump(mode="json", exclude_none=True) for name, each in bases.items()}
    plan = {"fits": found.problem is None, "serve": _serve(settings), **asdict(found), "bases": own}
    return json.dumps(plan, indent=1)


def as_table(found: CapacityPlan, settings: Settings) -> str:
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
    parts += [f"  {choice}" for choice in found.choices]
    if settings.samples:
        parts.append(f"\nto the samplers\n  full parameters by {found.weights_by}, adapters by shared memory")
    parts.append(f"\ndoes not fit: {found.problem}" if found.problem else f"\nfits:\n  {_serve(settings)}")
    return "\n".join(parts)


def _serve(settings: Settings) -> str:
    """Return the command that serves it: with what was given, as the rest is planned again."""
    words = ["skyrl-tinker", "serve"]
    for name in sorted(settings.model_fields_set, key=[*Settings.model_fields].index):
        value, option = getattr(settings, name), name.replace("_", "-")
        if name == "bases":
            words += chain.from_iterable(("--also", _also(each, own)) for each, own in value.items())
        elif isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", str(value)]
    return shlex.join(words)


def _also(name: str, own: BaseOverrides) -> str:
    uses = [*own.roles, *(["on_demand"] if own.start == "on_demand" else [])]
    return f"{name}:{','.join(uses)}"


def _size(size: float) -> str:
    return f"{size / GB:.2f}" if size >= GB / 100 else f"{size / GB:.6f}"

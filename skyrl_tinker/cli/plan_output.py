"""Output of `skyrl-tinker plan`: a table or JSON."""

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from skyrl_tinker import config
from skyrl_tinker.config import BaseOverrides, Settings
from skyrl_tinker.domain.units import GB
from skyrl_tinker.server.capacity_plan import CapacityPlan


def as_json(found: CapacityPlan, bases: Mapping[str, BaseOverrides], serve: str) -> str:
    """Write the plan of the first base model, and the settings of the further ones."""
    own = {name: each.model_dump(mode="json", exclude_none=True) for name, each in bases.items()}
    plan = {"fits": found.problem is None, "serve": serve, **asdict(found), "bases": own}
    return json.dumps(plan, indent=1)


def as_table(found: CapacityPlan, serve: str, *, samples: bool) -> str:
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
    if samples:
        parts.append(f"\nto the samplers\n  full parameters by {found.weights_by}, adapters by shared memory")
    parts.append(f"\ndoes not fit: {found.problem}" if found.problem else f"\nfits:\n  {serve}")
    return "\n".join(parts)


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

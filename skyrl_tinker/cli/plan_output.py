"""Output of `skyrl-tinker plan`: a table or JSON."""

import json
from dataclasses import asdict
from itertools import groupby

from skyrl_tinker.domain.units import GB
from skyrl_tinker.server.capacity_plan import CapacityPlan


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
    parts += [f"  {choice}" for choice in found.choices]
    parts.append(f"\nto the samplers\n  full parameters by {found.weights_by}, adapters by shared memory")
    parts.append(f"\n{'does not fit: ' + found.problem if found.problem else 'fits'}")
    return "\n".join(parts)


def _size(size: float) -> str:
    return f"{size / GB:.2f}" if size >= GB / 100 else f"{size / GB:.6f}"

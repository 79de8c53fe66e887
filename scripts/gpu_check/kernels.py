"""Kernels that ran on the device while something worked: their number, time, and the idle time between."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True, slots=True)
class Interval:
    name: str
    start_us: float
    end_us: float


def record(work: Callable[[], Any], device: str) -> list[Interval]:
    """Run `work`; return its kernels on CUDA, or torch's operators on the CPU."""
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as profiler:  # else torch 2.11 warns
        work()
    return [
        Interval(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type.name == device.upper() and not event.is_user_annotation
    ]


def idle_share(intervals: list[Interval]) -> float:
    """Return the share of the time from the first start to the last end in which nothing runs."""
    ordered = sorted(intervals, key=lambda each: each.start_us)
    began = covered = ordered[0].start_us
    idle = 0.0
    for each in ordered:
        idle += max(0.0, each.start_us - covered)
        covered = max(covered, each.end_us)
    return idle / (covered - began)


def longest(intervals: list[Interval], count: int) -> list[tuple[str, float]]:
    """Return the names that took most time, with their milliseconds."""
    totals: Counter[str] = Counter()
    for each in intervals:
        totals[each.name] += each.end_us - each.start_us  # type: ignore[assignment]
    return [(name, total / 1000) for name, total in totals.most_common(count)]

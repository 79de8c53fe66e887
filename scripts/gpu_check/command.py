"""Command line: all parts, one after the other, each in a process of its own."""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from gpu_check import (
    attention,
    cuda_ipc,
    families,
    fused,
    logprobs,
    losses,
    machine,
    parity,
    several,
    speed,
    state,
)
from gpu_check.checks import Check
from gpu_check.forked import Forked, ForkedError, alone
from gpu_check.rows import BROKEN, HEADER, SKIPPED, Row, failed
from gpu_check.setting import Setting

DOC = """Check the trainer on a GPU: kernels, numbers, memory and speed, in at most 10 minutes.

Needs Python 3.11 or later, torch 2.11 or later, transformers, safetensors and psutil; neither Ray, vLLM,
a server nor a model. Prints a table, "name | value | bound | ok", and as its last line one JSON object.
Nothing stops at a failure; the exit status is 1 when any row is not ok. "-" for ok: not checked, for the
reason in the row. --serve checks whole servers in place of the trainer, and needs all that these need
(scripts/setup gpu). "% MFU": floating-point operations that the result needs (for a token 4 for each frozen
weight, 6 for each of the adapter's, and causal attention; nothing recomputed) of 989 TFLOP/s, dense
bfloat16 of an H100 or H200.
"""
Checks = Callable[[Setting], list[Check]]
PARTS: dict[str, Checks] = {
    "machine": machine.checks,
    "attention": attention.checks,
    "fused": fused.checks,
    "logprobs": logprobs.checks,
    "parity": parity.checks,
    "families": families.checks,
    "losses": losses.checks,
    "state": state.checks,
    "ranks": several.checks,
    "cuda_ipc": cuda_ipc.checks,
    "speed": partial(speed.checks, recompute=None),
    "speed-kept": partial(speed.checks, recompute=False),
    "speed-recomputed": partial(speed.checks, recompute=True),
}
_MINUTES, _SERVED_MINUTES = 10.0, 20.0


def main() -> int:
    arguments = _arguments()
    setting = Setting("cpu" if arguments.cpu else "cuda", arguments.ranks)
    started = time.monotonic()
    rows = []
    print(HEADER)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as tempfile.tempdir:  # also of killed processes
        parts = _servers() if arguments.serve else {name: PARTS[name] for name in arguments.parts}
        for row in _all_rows(setting, parts, started + arguments.minutes * 60):
            print(row.line(), flush=True)
            rows.append(row)
    broken = sum(row.ok == BROKEN for row in rows)
    print(f"\n{len(rows)} rows, {broken} not ok, {sum(row.ok == SKIPPED for row in rows)} not checked")
    print(json.dumps(_summary(setting, rows, time.monotonic() - started)))
    return min(broken, 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu-check", description=DOC, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--serve", action="store_true", help="check servers, through the SDK")
    parser.add_argument("--cpu", action="store_true", help="the same code at small sizes on the CPU")
    parser.add_argument("--ranks", type=int, default=1, help="of `parity` and `ranks`, a GPU each (NCCL)")
    minutes = f"after which the rest is not ok ({_MINUTES:g}, with --serve {_SERVED_MINUTES:g})"
    parser.add_argument("--minutes", type=float, help=minutes)
    arguments = parser.parse_args()
    if arguments.serve and arguments.parts:
        parser.error("--serve: expected no parts beside it")
    arguments.parts = arguments.parts or list(PARTS)
    arguments.minutes = arguments.minutes or (_SERVED_MINUTES if arguments.serve else _MINUTES)
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no such parts: {', '.join(unknown)}")
    return arguments


def _servers() -> dict[str, Checks]:
    from gpu_check import served  # needs the SDK

    return {"servers": served.checks}


def _all_rows(setting: Setting, parts: Mapping[str, Checks], end: float) -> Iterator[Row]:
    if not setting.small and not alone(torch.cuda.is_available):
        yield failed("GPU", "torch finds none here; --cpu checks what a CPU can")
        return
    for name, checks in parts.items():
        yield from _part(name, checks, setting, end)


def _part(name: str, checks: Checks, setting: Setting, end: float) -> Iterator[Row]:
    """Yield the rows of a part; also when its process dies, or time is up."""
    if time.monotonic() > end:
        yield failed(f"part {name}", "not run: time is up")
        return
    process = Forked(_rows, checks, setting)
    try:
        while received := list(process.receive(max(0.0, end - time.monotonic()))):
            yield from received
    except ForkedError as error:
        yield failed(f"part {name}", error)
    finally:
        process.close()


def _rows(checks: Checks, setting: Setting) -> Iterator[Row]:
    for check in checks(setting):
        yield from check.rows()


def _summary(setting: Setting, rows: list[Row], seconds: float) -> dict[str, Any]:
    return {
        "device": setting.device,
        "torch": torch.__version__,
        "ok": all(row.ok != BROKEN for row in rows),
        "seconds": round(seconds, 1),
        "rows": [asdict(row) for row in rows],
    }

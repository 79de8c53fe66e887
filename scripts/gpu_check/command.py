"""Command line: all parts, one after the other, each in a process of its own."""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from gpu_check import attention, cuda_ipc, logprobs, machine, parity, speed, state
from gpu_check.checks import Check
from gpu_check.forked import Forked, ForkedError, alone
from gpu_check.rows import BROKEN, HEADER, SKIPPED, Row, failed
from gpu_check.setting import Setting

DOC = """Check the trainer on a GPU: kernels, numbers, memory and speed, in at most 8 minutes.

Needs Python 3.11 or later, torch 2.11 or later, transformers, safetensors and psutil; neither Ray, vLLM,
a server nor a model. Prints a table, "name | value | bound | ok", and as its last line one JSON object.
Nothing stops at a failure; the exit status is 1 when any row is not ok. "-" for ok: not checked, for the
reason in the row. "% MFU": floating-point operations that the result needs (for a token 4 for each frozen
weight, 6 for each of the adapter's, and causal attention; nothing recomputed) of 989 TFLOP/s, dense
bfloat16 of an H100 or H200.
"""
PARTS: dict[str, Callable[[Setting], list[Check]]] = {
    "machine": machine.checks,
    "attention": attention.checks,
    "logprobs": logprobs.checks,
    "parity": parity.checks,
    "state": state.checks,
    "cuda_ipc": cuda_ipc.checks,
    "speed": partial(speed.checks, recompute=None),
    "speed-kept": partial(speed.checks, recompute=False),
    "speed-recomputed": partial(speed.checks, recompute=True),
}


def main() -> int:
    arguments = _arguments()
    setting = Setting("cpu" if arguments.cpu else "cuda", arguments.ranks)
    started = time.monotonic()
    rows = []
    print(HEADER)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as tempfile.tempdir:  # also of killed processes
        for row in _all_rows(setting, arguments.parts, started + arguments.minutes * 60):
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
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--cpu", action="store_true", help="the same code at small sizes on the CPU")
    parser.add_argument("--ranks", type=int, default=1, help="trainer ranks of `parity`, a GPU each (NCCL)")
    parser.add_argument("--minutes", type=float, default=8.0, help="after which the rest is not ok")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no such parts: {', '.join(unknown)}")
    return arguments


def _all_rows(setting: Setting, parts: list[str], end: float) -> Iterator[Row]:
    if not setting.small and not alone(torch.cuda.is_available):
        yield failed("GPU", "torch finds none here; --cpu checks what a CPU can")
        return
    for name in parts:
        yield from _part(name, setting, end)


def _part(name: str, setting: Setting, end: float) -> Iterator[Row]:
    """Yield the rows of a part; also when its process dies, or time is up."""
    if time.monotonic() > end:
        yield failed(f"part {name}", "not run: time is up")
        return
    process = Forked(_rows, PARTS[name], setting)
    try:
        while received := list(process.receive(max(0.0, end - time.monotonic()))):
            yield from received
    except ForkedError as error:
        yield failed(f"part {name}", error)
    finally:
        process.close()


def _rows(checks: Callable[[Setting], list[Check]], setting: Setting) -> Iterator[Row]:
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

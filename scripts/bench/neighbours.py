#!/usr/bin/env python3
"""What a quiet tenant notices of another one that does harm: its numbers, its waits, its failures.

usage: scripts/bench/neighbours.py [--attacks A,B] [--seconds S]

It starts a server with keys. The quiet tenant trains one adapter (forward_backward of 8 datums of 64 tokens,
optim_step, a save every 10 steps) and samples 8 tokens from it, one request after the other, for --seconds
(20) alone, then beside each attack, at the end alone again; every time from the same start, so that loss
metrics, logprobs, metrics of steps and sampled tokens must come out bit by bit as they did alone. Each attack
runs in a process of its own, at the lowest priority, with keys of its own unless its name says otherwise.

One unit of the other's work is what one of its requests takes from the client's side while nobody else works:
measured by the attacker before it begins, or once it has ended; 0 where it does no work. Requests of each
kind may take 1.5 x their p99 alone, and one unit.

With the default arguments it ends within ten minutes. On a CPU the trainer runs out of memory because it is
given a limit (RLIMIT_DATA) for as long as the attack lasts.

Prints a table and, as its last line, one JSON object: bit_equal; failed: requests of the quiet one;
worst_p99_ratio_fb and worst_p99_ratio_sample: beside an attack / alone; missed: the bars that were not held,
which make the exit code 1; and all figures of the table.
"""

import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TINKER_TELEMETRY", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
import tinker
from attacks import Attacker
from serving import chosen, judged, options_of
from tinker import types

from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from tests.e2e.support.client import datum, prompt, random_tokens
from tests.support.serve import Serve, serving
from tests.support.waiting import wait_until

DATA = [[datum(random_tokens(65, seed=100 * step + row)) for row in range(8)] for step in range(8)]
PROMPTS = [prompt(random_tokens(16, seed=1000 + step)) for step in range(8)]
ADAM = types.AdamParams(learning_rate=1e-4)
TOKENS, SAVE_EVERY = 8, 10
KINDS = ("forward_backward", "optim_step", "sample", "save")
BARRED = KINDS[:3]
SLOWER = 1.5
RESULT_S, DRAIN_S, WARM_S, SETTLE_S = 120.0, 120.0, 5.0, 1.0
MIB = 1 << 20
TRAINER_ROOM = 8 * MIB
"""Growth that a trainer is allowed which is to run out of memory: a row as long as the context needs more."""
QUIET, OTHER = "quiet", "other"
EIGHT = tuple(f"{OTHER}-{number}" for number in range(8))
PENDING = "skyrl_tinker_requests_pending{"


# The quiet tenant


@dataclass
class Run:
    """What the quiet tenant got: `numbers` of each step, `waits` in seconds by kind, `failures`."""

    numbers: list[tuple[Any, ...]] = field(default_factory=list)
    waits: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    failures: list[str] = field(default_factory=list)

    def timed(self, kind: str, work: Callable[[], Any]) -> Any:
        """Return the result of `work`, None if it failed."""
        began = time.perf_counter()
        try:
            result = work().result(timeout=RESULT_S)
        except Exception as error:  # counted: none is expected
            self.failures.append(f"{kind}: {type(error).__name__}: {error}")
            return None
        finally:
            self.waits[kind].append(time.perf_counter() - began)
        return result

    def p(self, kind: str, share: float) -> float:
        """Return a percentile of the waits, in milliseconds."""
        waits = sorted(self.waits[kind])
        return 1000 * waits[int(share * (len(waits) - 1))] if waits else float("nan")


def quiet(url: str, key: str, seconds: float, most: int | None = None) -> Run:
    """Train and sample for `seconds`, at most so many steps; always the same from the first step on."""
    run = Run()
    with tinker.ServiceClient(base_url=url, api_key=key) as service:
        training = service.create_lora_training_client(base_model="tiny", rank=8, seed=1).result()
        sampler: Any = None
        until = time.monotonic() + seconds
        while time.monotonic() < until and len(run.numbers) != most and not run.failures:
            number = len(run.numbers)
            trained = train(run, training, number)
            if number % SAVE_EVERY == 0:
                sampler = run.timed("save", training.save_weights_and_get_sampling_client)
            sampled = sample(run, sampler, number) if sampler else None
            run.numbers.append((*trained, sampled))
    return run


def train(run: Run, training: tinker.TrainingClient, number: int) -> tuple[Any, ...]:
    """Return metrics and logprobs of a pass, and the metrics of the step after it."""
    data = DATA[number % len(DATA)]
    output = run.timed("forward_backward", lambda: training.forward_backward(data, "cross_entropy"))
    step = run.timed("optim_step", lambda: training.optim_step(ADAM))
    logprobs = output and [each["logprobs"].to_numpy().tobytes() for each in output.loss_fn_outputs]
    return output and output.metrics, logprobs, step and step.metrics


def sample(run: Run, sampler: tinker.SamplingClient, number: int) -> list[int] | None:
    params = types.SamplingParams(max_tokens=TOKENS, seed=number, stop=[])
    answer = run.timed("sample", lambda: sampler.sample(PROMPTS[number % len(PROMPTS)], 1, params))
    return list(answer.sequences[0].tokens) if answer else None


# The attacks


@dataclass(frozen=True)
class Case:
    """An attack of `attacks.py`, and the holders of its keys.

    What the bench itself does: `around` all of it, and `then`, once it has begun.
    """

    attack: str
    holders: Sequence[str] = (OTHER,)
    around: Callable[[Serve], Any] = lambda serve: nullcontext()
    then: Callable[[Serve], object] = lambda serve: None
    expected: str = ""
    """An answer that the attacker must get: else nothing was shown."""


@contextmanager
def trainer_without_memory(serve: Serve) -> Iterator[None]:
    """Give the trainer's process next to no memory beyond what it has."""
    trainer = serve.find("trainer")
    assert trainer is not None
    _, most = trainer.rlimit(psutil.RLIMIT_DATA)
    held = trainer.memory_info().data  # of Linux: data and stack
    trainer.rlimit(psutil.RLIMIT_DATA, (held + TRAINER_ROOM, most))
    try:
        yield
    finally:
        if trainer.is_running():
            trainer.rlimit(psutil.RLIMIT_DATA, (psutil.RLIM_INFINITY, most))


def revoke(serve: Serve) -> None:
    """Revoke the other one's key."""
    keys(serve.home, "revoke", "revoked")


CASES = {
    "out_of_memory": Case("long_rows", around=trainer_without_memory, expected="out of memory"),
    "train_same_key": Case("train", (QUIET,) * 8, expected="ok"),
    "train_other_keys": Case("train", EIGHT, expected="ok"),
    "sample": Case("sample", expected="ok"),
    "completions": Case("completions", expected="ok"),
    "bodies": Case("bodies", expected="ok"),
    "not_a_number": Case("not_a_number", expected="RequestFailedError"),
    "too_long": Case("too_long", expected="RequestFailedError"),
    "spin": Case("spin", expected="ok"),
    "half_open": Case("half_open", expected="opened"),
    "killed": Case("killed", expected="killed"),
    "revoked": Case("train", ("revoked",) * 2, then=revoke, expected="ok"),
}
"""`out_of_memory` is the first: the trainer keeps memory that it once had, and longer rows fit then."""


def keys(home: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "skyrl_tinker", "keys", *arguments, "--home", str(home)]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=home.parent).stdout.strip()


def beside(serve: Serve, case: Case, made: Mapping[str, str], seconds: float, most: int) -> "Beside":
    with Attacker(case.attack, serve.url, [made[holder] for holder in case.holders]) as attacker:
        with case.around(serve):
            attacker.go()
            time.sleep(SETTLE_S)
            case.then(serve)
            run = quiet(serve.url, made[QUIET], seconds, most)
        outcomes = attacker.stop()  # which measures a unit of its work, unaided
    return Beside(run, 1000 * attacker.unit_s, outcomes)


@dataclass(frozen=True)
class Beside:
    """The quiet tenant beside an attack, of which one unit takes `unit_ms`."""

    run: Run
    unit_ms: float = 0.0
    outcomes: Mapping[str, int] = field(default_factory=dict)


def drain(serve: Serve) -> None:
    """Wait until nothing of an attack is left to do. Raises TimeoutError."""
    wait_until(lambda: not pending(serve.url), DRAIN_S)
    time.sleep(SETTLE_S)


def pending(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics") as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(PENDING))


# The report


class Report:
    """Compares with `alone`, the first run; its waits are those of the last run, too."""

    def __init__(self, alone: Run) -> None:
        self._alone = alone
        self._rows = {"alone": self._row(Beside(alone))}
        self._missed: list[str] = []
        show_head()
        show("alone", self._rows["alone"])

    def add(self, name: str, found: Beside, expected: str = "") -> None:
        """Add a run beside an attacker, who must have got the answer `expected`."""
        self._rows[name] = row = self._row(found)
        self._missed += [f"{name}: {failure}" for failure in found.run.failures]
        self._missed += [] if row["bit_equal"] else [f"{name}: the numbers differ"]
        if expected and not found.outcomes.get(expected):
            self._missed.append(f"{name}: the attacker got no {expected!r}")
        show(name, row)

    def add_alone(self, again: Run) -> None:
        """Add another run alone."""
        for kind, waits in again.waits.items():
            self._alone.waits[kind] += waits
        self.add("alone again", Beside(again))

    def _row(self, found: Beside) -> dict[str, Any]:
        run = found.run
        return {
            "bit_equal": not run.failures and run.numbers == self._alone.numbers[: len(run.numbers)],
            "failed": len(run.failures),
            "steps": len(run.numbers),
            "unit_ms": round(found.unit_ms, 1),
            "outcomes": dict(found.outcomes),
            **{
                f"{kind}_{part}_ms": round(run.p(kind, share), 1)
                for kind in KINDS
                for part, share in (("p50", 0.5), ("p99", 0.99))
            },
        }

    def finish(self) -> dict[str, Any]:
        attacks = [name for name in self._rows if not name.startswith("alone")]
        slow = [text for name in attacks for kind in BARRED if (text := self._too_slow(name, kind))]
        worst = {kind: max(self._ratio(name, kind) for name in attacks) for kind in BARRED}
        return {
            "bit_equal": all(row["bit_equal"] for row in self._rows.values()),
            "failed": sum(row["failed"] for row in self._rows.values()),
            "worst_p99_ratio_fb": worst["forward_backward"],
            "worst_p99_ratio_optim": worst["optim_step"],
            "worst_p99_ratio_sample": worst["sample"],
            "missed": self._missed + slow,
            "rows": self._rows,
        }

    def _ratio(self, name: str, kind: str) -> float:
        return round(float(self._rows[name][f"{kind}_p99_ms"]) / self._alone.p(kind, 0.99), 2)

    def _too_slow(self, name: str, kind: str) -> str:
        row = self._rows[name]
        found, bar = row[f"{kind}_p99_ms"], SLOWER * self._alone.p(kind, 0.99) + row["unit_ms"]
        return "" if found <= bar else f"{name}: {kind} p99 {found:.0f} ms, at most {bar:.0f}"


def show_head() -> None:
    head = f"{'p50 / p99 in ms':18}{'steps':>6}{'equal':>7}{'failed':>7}{'unit ms':>9}"
    print(head + "".join(f"{kind:>20}" for kind in KINDS) + "  answers of the attacker", flush=True)


def show(name: str, row: Mapping[str, Any]) -> None:
    equal = "yes" if row["bit_equal"] else "no"
    figures = f"{name:18}{row['steps']:6}{equal:>7}{row['failed']:7}{row['unit_ms']:9.0f}{_pairs(row)}"
    print(
        figures, "", ", ".join(f"{count} x {answer}" for answer, count in row["outcomes"].items()), flush=True
    )


def _pairs(row: Mapping[str, float]) -> str:
    return "".join(f"{row[f'{kind}_p50_ms']:>10.0f} / {row[f'{kind}_p99_ms']:>7.0f}" for kind in KINDS)


def measure(serve: Serve, made: Mapping[str, str], names: Sequence[str], seconds: float) -> dict[str, Any]:
    quiet(serve.url, made[QUIET], WARM_S)
    alone = quiet(serve.url, made[QUIET], seconds)
    if alone.failures:
        raise SystemExit(f"the quiet tenant fails alone: {alone.failures[0]}")
    report = Report(alone)
    for name in names:
        found = beside(serve, CASES[name], made, seconds, len(alone.numbers))
        report.add(name, found, CASES[name].expected)
        drain(serve)
    report.add_alone(quiet(serve.url, made[QUIET], seconds, len(alone.numbers)))
    return report.finish()


def main() -> int:
    parser = options_of(__doc__)
    parser.add_argument("--attacks", help=f"some of {','.join(CASES)}")
    parser.add_argument("--seconds", type=float, help="of each run")
    arguments = parser.parse_args()
    names = chosen(parser, arguments.attacks, CASES)
    seconds = arguments.seconds or 20.0
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory) / "home"
        holders = {QUIET, *(holder for name in names for holder in CASES[name].holders)}
        made = {holder: keys(home, "create", "--name", holder) for holder in sorted(holders)}
        with serving(home) as serve:
            result = measure(serve, made, names, seconds)
        Directories(Settings(home=home)).delete_outside_home()
    return judged(result)


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""One RL session for a long time while processes are killed: does anything fail, grow or slow down.

usage: scripts/bench/soak.py [--full] [--samples N] [--steps N] [--every S] [--seed N]

It starts a server whose results and unnamed weights expire soon, and trains one adapter: each step is a
forward_backward on samples of the step before, an optim_step, a save of unnamed weights, and samples from
these, all at once. --full: 131,072 samples in 2,000 steps. One process of the server is killed every --every
seconds (60; 0: none). Sizes at the start are those before the first step, memory (RSS) that after the first
tenth of the steps. At the end nothing is sent until all has expired that can; then both are taken again.

Errors are requests that failed, samples of another length than asked for, steps that the optimizer did not
count by one, and logprobs of the trainer that differ from the sampler's by more than 1e-3: then one of them
has not the newest weights.

Steps between a kill and the end of the first step that began after the recovery are disturbed, the others
quiet. `first` and `last` are latencies in the first and the last tenth of the quiet steps, `by_tenth` those
in each tenth, with the machine's pace (`pace_ms`: processor time of a fixed piece of work), as that wanders.

Needs the packages of `scripts/setup tests`. With the default arguments it ends within five minutes.
Prints, as its last line, one JSON object: errors; p99_ratio: of quiet samples, last / first; db_mb, tmpfs_mb,
home_mb: at the end; rss_growth: end / start of the kind of process that grew most; and what else was counted.
`missed` names the bars that were not held, which make the exit code 1.
"""

import argparse
import asyncio
import os
import random
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TINKER_API_KEY", "tml-local")
os.environ.setdefault("TINKER_TELEMETRY", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import tinker
from client import random_tokens
from serving import judged, options_of
from tinker import types

from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from tests.e2e.support.client import datum, prompt
from tests.support.kills import VICTIMS, Victims, await_recovery
from tests.support.serve import CORE, KINDS, Serve, serving

DEFAULT, FULL = (3_840, 60), (131_072, 2_000)  # samples, steps
SETTINGS = """
retention = {results_s = 20}
ephemeral = {keep = 4, idle_s = 10}
"""
REST_S = 90.0
"""Time in which all has been purged: dropped weights twice `results_s` after that, at intervals of one."""
RESULT_S, PROGRESS_S = 600.0, 30.0
PROMPT, TOKENS, TRAINED = 16, 16, 8
GAP = 1e-3
SLOWER, SLOWER_SHORT = 1.1, 1.5
"""Bars of last / first: in a short run of the p50 only, and wider, since the machine's noise is more."""
MORE_MB = {"db_live": 0.3, "tmpfs": 2.0, "tmp": 4.0, "files": 4.0}
"""Bars of end - start. The file of the database, which never shrinks, holds what lived at once at most."""
RSS_GROWTH = {CORE: 2.0}
"""Bars of end / start, 1.15 for the others: oneDNN keeps 1,024 primitives, by layer and size of the batch."""
ADAM = types.AdamParams(learning_rate=1e-4)
"""A step moves logprobs by 4e-3, more than `GAP`. At 1e-3 the model comes to magnify rounding to `GAP`."""
SAMPLING = types.SamplingParams(max_tokens=TOKENS, temperature=1.0, stop=[])
MB = 2**20


@dataclass
class Step:
    """`began`, `ended`: of the monotonic clock; `samples`: seconds of each; `pace`: what `pace` returned."""

    began: float
    ended: float = 0.0
    pace: float = 0.0
    samples: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Kill:
    kind: str
    began: float
    healed: float


@dataclass(frozen=True)
class Rollout:
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]

    def datum(self) -> types.Datum:
        """With a random advantage, +1 or -1."""
        before = [0.0] * (PROMPT - 1)
        advantage = random.choice((1.0, -1.0))
        return datum(
            [*self.prompt, *self.tokens],
            logprobs=[*before, *self.logprobs],
            advantages=[*before, *[advantage] * TOKENS],
        )


# The clients


def pace() -> float:
    """Return the seconds of processor time that a fixed piece of work takes."""
    began = time.thread_time()
    sum(range(100_000))
    return time.thread_time() - began


class Session:
    """One adapter that trains, and its samplers."""

    def __init__(self, training: tinker.TrainingClient) -> None:
        self.steps: list[Step] = []
        self.errors: list[str] = []
        self._training = training
        self._rollouts: list[Rollout] = []
        self._optimizer_steps = 0.0

    async def step(self, samples: int) -> None:
        """Train on rollouts of the step before, save, sample from the new weights."""
        step = Step(time.monotonic())
        trained = self._train()
        sampler = await self._result(self._training.save_weights_and_get_sampling_client())
        await trained
        rollouts = await asyncio.gather(*(self._sample(sampler, step) for _ in range(samples)))
        self._rollouts = [rollout for rollout in rollouts if rollout is not None][:TRAINED]
        step.ended = time.monotonic()
        step.pace = pace()
        self.steps.append(step)

    def _train(self) -> Awaitable[None]:
        """Send a pass and a step at once; the result checks what they answer."""
        if not self._rollouts:
            return asyncio.sleep(0)
        rollouts = self._rollouts
        backward = self._training.forward_backward([each.datum() for each in rollouts], "importance_sampling")
        return self._check(rollouts, backward, self._training.optim_step(ADAM))

    async def _check(self, rollouts: Sequence[Rollout], backward: Any, optim_step: Any) -> None:
        output = await self._result(backward)
        if output is not None:
            trained = [each["logprobs"].to_numpy()[-TOKENS:] for each in output.loss_fn_outputs]
            gap = float(np.abs(np.array(trained) - [each.logprobs for each in rollouts]).max())
            self._require(gap <= GAP, f"logprobs of trainer and sampler differ by {gap}")
        done = await self._result(optim_step)
        if done is not None:
            self._optimizer_steps += 1
            count = done.metrics["optimizer_step"]
            self._require(count == self._optimizer_steps, f"{count} steps, not {self._optimizer_steps}")
            self._optimizer_steps = count

    async def _sample(self, sampler: tinker.SamplingClient | None, step: Step) -> Rollout | None:
        question = random_tokens(PROMPT)
        began = time.monotonic()
        answer = None
        if sampler is not None:
            answer = await self._result(sampler.sample(prompt(question), 1, SAMPLING))
        if answer is None:
            return None
        step.samples.append(time.monotonic() - began)
        sequence = answer.sequences[0]
        rollout = Rollout(question, list(sequence.tokens), list(sequence.logprobs or []))
        whole = len(rollout.tokens) == len(rollout.logprobs) == TOKENS
        self._require(whole, f"a sample of {len(rollout.tokens)} tokens, {len(rollout.logprobs)} logprobs")
        return rollout if whole else None

    async def _result(self, pending: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(RESULT_S):
                return await pending
        except Exception as error:  # counted: none is expected
            self._require(False, f"{type(error).__name__}: {error}")
            return None

    def _require(self, condition: bool, message: str) -> None:
        if not condition:
            self.errors.append(message)
            print(f"error: {message}", flush=True)


# The kills


class Killer(threading.Thread):
    """Kills a process, waits until the server has recovered, and so on, until `stop`."""

    def __init__(self, serve: Serve, every_s: float, seed: int) -> None:
        super().__init__(daemon=True)
        self.kills: list[Kill] = []
        self._failure: Exception | None = None
        self._stopped = threading.Event()
        self._serve = serve
        self._every_s = every_s
        self._victims = Victims(random.Random(seed), VICTIMS)

    def run(self) -> None:
        try:
            while not self._stopped.wait(self._every_s):
                self._kill(self._victims.choose())
        except Exception as error:  # raised by `stop`
            self._failure = error

    def stop(self) -> None:
        """Return once the server has recovered from the last kill. Raises what made it fail."""
        self._stopped.set()
        self.join()
        if self._failure is not None:
            raise self._failure

    def _kill(self, kind: str) -> None:
        victim = self._serve.find(kind)
        if victim is None:
            return
        print(f"kill {len(self.kills) + 1}: {kind}", flush=True)
        began = time.monotonic()
        victim.kill()
        await_recovery(self._serve, kind, victim)
        self.kills.append(Kill(kind, began, time.monotonic()))


# What grows


class Sizes:
    """Sizes of a server's files, rows and processes at one moment."""

    def __init__(self, serve: Serve) -> None:
        directories = Directories(Settings(home=serve.home))
        database = serve.home / "skyrl-tinker.db"
        self.rows, live_bytes = _rows(database)
        database_bytes = sum(_bytes(path) for path in serve.home.glob(f"{database.name}*"))
        self.mb = {
            "db": database_bytes / MB,
            "db_live": live_bytes / MB,
            "tmpfs": _bytes(directories.ephemeral_dir) / MB,
            "home": _bytes(serve.home) / MB,
            "files": (_bytes(serve.home) - database_bytes) / MB,
            "tmp": _bytes(directories.bell_dir) / MB,
        }
        found = {kind: serve.find(kind) for kind in (*KINDS, CORE)}
        self.rss_mb = {
            kind: process.memory_info().rss / MB for kind, process in found.items() if process is not None
        }

    def __str__(self) -> str:
        parts = (*self.mb.items(), *self.rss_mb.items())
        return ", ".join(f"{name} {mb:.1f}" for name, mb in parts)


def _bytes(path: Path) -> int:
    """Return what a file, or all files below a directory, take; those that go away meanwhile take nothing."""
    try:
        if path.is_dir():
            return sum(_bytes(each) for each in path.iterdir())
        return path.lstat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _rows(database: Path) -> tuple[dict[str, int], int]:
    """Return the rows of each table, and the bytes of all pages that are not free."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as conn:

        def value(statement: str) -> int:
            return int(conn.execute(statement).fetchone()[0])

        tables = [name for (name,) in conn.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        rows = {name: value(f'SELECT count(*) FROM "{name}"') for name in tables}
        pages = value("PRAGMA page_count") - value("PRAGMA freelist_count")
        return rows, pages * value("PRAGMA page_size")


# The report


def quiet_steps(steps: Sequence[Step], kills: Sequence[Kill]) -> list[Step]:
    """Return those outside of [a kill, the end of the first step that began after the recovery]."""
    spans = []
    for kill in kills:
        after = [step.ended for step in steps if step.began >= kill.healed]
        spans.append((kill.began, after[0] if after else float("inf")))
    return [step for step in steps if all(step.ended < began or step.began >= end for began, end in spans)]


def latencies(steps: Sequence[Step]) -> dict[str, float]:
    """Return milliseconds: p50 and p99 of samples and of whole steps."""
    samples = [seconds for step in steps for seconds in step.samples]
    wholes = [step.ended - step.began for step in steps]
    return {
        f"{name}_{part}_ms": round(1000 * percentile(values, share), 1)
        for name, values in (("sample", samples), ("step", wholes))
        for part, share in (("p50", 0.5), ("p99", 0.99))
    }


def by_tenth(steps: Sequence[Step]) -> list[dict[str, float]]:
    """Return the latencies of each tenth, and the machine's pace in it, in milliseconds."""
    tenths = [steps[number * len(steps) // 10 : (number + 1) * len(steps) // 10] for number in range(10)]
    return [
        latencies(tenth) | {"pace_ms": round(1000 * percentile([step.pace for step in tenth], 0.5), 2)}
        for tenth in tenths
    ]


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))] if values else float("nan")


def report(
    session: Session,
    kills: Sequence[Kill],
    start: Sizes,
    warm_mb: Mapping[str, float],
    end: Sizes,
    *,
    full: bool,
) -> dict[str, Any]:
    """Compare start and end. `warm_mb`: RSS at the start. `full`: with the bars of a long run."""
    quiet = quiet_steps(session.steps, kills)
    tenth = max(1, len(quiet) // 10)
    first, last = latencies(quiet[:tenth]), latencies(quiet[-tenth:])
    ratios = {name: round(last[name] / first[name], 3) for name in first}
    rss_ratios = {kind: end.rss_mb[kind] / mb for kind, mb in warm_mb.items() if kind in end.rss_mb}
    grown = max(rss_ratios, key=rss_ratios.__getitem__)
    disturbed = [step for step in session.steps if step not in quiet]
    barred = ratios if full else {name: ratio for name, ratio in ratios.items() if "p50" in name}
    slower = SLOWER if full else SLOWER_SHORT
    missed = [f"{name}: {ratio}" for name, ratio in barred.items() if ratio > slower]
    missed += [
        f"{name}_mb: {start.mb[name]:.1f} -> {end.mb[name]:.1f}"
        for name, mb in MORE_MB.items()
        if end.mb[name] > start.mb[name] + mb
    ]
    missed += [
        f"rss of {kind}: {ratio:.2f}"
        for kind, ratio in rss_ratios.items()
        if ratio > RSS_GROWTH.get(kind, 1.15)
    ]
    return {
        "errors": len(session.errors),
        "p99_ratio": ratios["sample_p99_ms"],
        **{f"{name}_mb": round(mb, 1) for name, mb in end.mb.items()},
        "rss_growth": round(rss_ratios[grown], 3),
        "samples": sum(len(step.samples) for step in session.steps),
        "steps": len(session.steps),
        "kills": len(kills),
        "ratios": ratios,
        "by_tenth": by_tenth(quiet),
        "first": first,
        "last": last,
        "disturbed": latencies(disturbed) if disturbed else None,
        "disturbed_steps": len(disturbed),
        "recovery_max_s": round(max((kill.healed - kill.began for kill in kills), default=0.0), 1),
        "killed": Counter(kill.kind for kill in kills),
        "start_mb": {name: round(mb, 1) for name, mb in start.mb.items()},
        "rss_mb": {
            kind: [round(warm_mb.get(kind, 0)), round(end.rss_mb.get(kind, 0))]
            for kind in {**warm_mb, **end.rss_mb}
        },
        "rows": {table: [start.rows[table], rows] for table, rows in end.rows.items() if rows},
        "missed": [*(["errors"] if session.errors else []), *missed],
    }


async def soak(serve: Serve, arguments: argparse.Namespace) -> dict[str, Any]:
    killer = Killer(serve, arguments.every or threading.TIMEOUT_MAX, arguments.seed)
    with tinker.ServiceClient(base_url=serve.url) as service:
        session = Session(await service.create_lora_training_client(base_model="tiny", rank=8))
        await session.step(TRAINED)  # warms up, not counted
        session.steps.clear()
        start = Sizes(serve)
        killer.start()
        tenth = arguments.steps // 10
        await run_steps(session, serve, arguments, range(tenth))
        warm = Sizes(serve)
        await run_steps(session, serve, arguments, range(tenth, arguments.steps))
        await asyncio.to_thread(killer.stop)
        await asyncio.sleep(REST_S)
        show(session, serve, arguments.steps)
        return report(session, killer.kills, start, warm.rss_mb, Sizes(serve), full=arguments.full)


async def run_steps(session: Session, serve: Serve, arguments: argparse.Namespace, numbers: range) -> None:
    shown = time.monotonic()
    for number in numbers:
        before, after = (arguments.samples * each // arguments.steps for each in (number, number + 1))
        await session.step(after - before)
        if time.monotonic() - shown > PROGRESS_S:
            shown = time.monotonic()
            show(session, serve, number)


def show(session: Session, serve: Serve, number: int) -> None:
    p50 = latencies(session.steps[-10:])
    print(
        f"step {number}: {len(session.errors)} errors, p50 of a sample {p50['sample_p50_ms']} ms, "
        f"of a step {p50['step_p50_ms']} ms; MB: {Sizes(serve)}",
        flush=True,
    )


@contextmanager
def serving_apart(settings: str) -> Iterator[Serve]:
    """Yield a server with these settings in a home of its own, of which nothing is left."""
    with tempfile.TemporaryDirectory() as directory:
        (config := Path(directory) / "settings.toml").write_text(settings)
        home = Path(directory) / "home"
        with serving(home, "--config", str(config)) as serve:
            yield serve
        Directories(Settings(home=home)).delete_outside_home()


def main() -> int:
    parser = options_of(__doc__)
    parser.add_argument(
        "--full", action="store_true", help="131,072 samples, 2,000 steps, the bars of a long run"
    )
    parser.add_argument("--samples", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between kills; 0: none")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    arguments = parser.parse_args()
    samples, steps = FULL if arguments.full else DEFAULT
    arguments.samples = arguments.samples or samples
    arguments.steps = arguments.steps or steps
    if not arguments.samples >= arguments.steps >= 10:
        parser.error("--steps must be at least 10, and --samples at least as many")
    with serving_apart(SETTINGS) as serve:
        return judged(asyncio.run(soak(serve, arguments)))


if __name__ == "__main__":
    sys.exit(main())

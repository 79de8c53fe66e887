"""Whole servers on this machine, asked through the SDK: weights on their way to samplers, turns, learning."""

import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import tinker
import torch
from tinker import types

from gpu_check.checks import Check
from gpu_check.forked import alone
from gpu_check.models import make_base
from gpu_check.rows import Row, at_most, measured, measured_together, require, skipped
from gpu_check.setting import NOT_ON_CPU, Setting
from skyrl_tinker.server.base_models.tiny_model import make_model
from skyrl_tinker.system.processes import die_with_parent

RL_LOOP = Path(__file__).resolve().parents[2] / "examples" / "rl_loop.py"
_READY = "skyrl-tinker ready: "
_GAPS = {"cpu": 1e-3, "cuda": 0.25}  # the default bounds of the server: float32 and bfloat16
_REPEATS = 3
_LEARNING_RATE = 1e-3
_GB = 1e9


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. `model`: shape of its base model."""

    setting: Setting
    model: str
    placement: str
    url: str
    base_model: str

    def name(self, what: str) -> str:
        return f"served {self.model}, {self.placement}: {what}"

    def timed(self, what: str, seconds: float, bound: float | None = None) -> Row:
        """Report a time; on a GPU it has a bound, if one is given."""
        name = self.name(f"{what} [s]")
        if self.setting.small or bound is None:
            return measured(name, seconds)
        return at_most(name, seconds, bound)

    def train(self, rank: int) -> tinker.TrainingClient:
        service = tinker.ServiceClient(base_url=self.url)
        return service.create_lora_training_client(base_model=self.base_model, rank=rank).result()


Ask = Callable[[Server], Iterator[Row]]


def checks(setting: Setting) -> list[Check]:
    """One server for each model; on a CPU one for all, as it takes as long to start as what it is asked."""
    asked: Mapping[str, list[Ask]] = {"8B": [_adapters, _turns], "2B": [_full], "tiny": [_demo]}
    if setting.small:
        asked = {"tiny": [_adapters, _turns, _full]}  # tests/e2e/test_demo.py runs the demo
    servers = [
        Check(f"server of {model}", partial(_serve, setting, model, "colocated", asks))
        for model, asks in asked.items()
    ]
    return [*servers, Check("served, separate: NCCL", partial(_separate, setting))]


def _separate(setting: Setting) -> Iterator[Row]:
    if setting.small or alone(torch.cuda.device_count) < 2:
        yield skipped("served, separate: NCCL", NOT_ON_CPU if setting.small else "needs two GPUs")
    else:
        yield from _serve(setting, "2B", "separate", [_adapters, _full])


def _serve(setting: Setting, model: str, placement: str, asks: list[Ask]) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as directory:
        alone(_write, model, directory, setting.device)
        began = time.monotonic()
        with _running(setting, directory, placement) as url:
            server = Server(setting, model, placement, url, directory)
            yield server.timed("start, with the comparison of logprobs", time.monotonic() - began)
            for ask in asks:
                yield from Check(server.name(ask.__name__.strip("_")), partial(ask, server)).rows()


def _write(model: str, directory: str, device: str) -> None:
    make_model(Path(directory))  # its tokenizer serves larger vocabularies, too
    if model != "tiny":
        with torch.device(device):
            make_base(model, dtype=torch.bfloat16).save_pretrained(directory)


@contextmanager
def _running(setting: Setting, base_model: str, placement: str) -> Iterator[str]:
    """Context of a server, with its URL."""
    os.environ.setdefault("TINKER_API_KEY", "tml-local")
    with tempfile.TemporaryDirectory() as home:
        options = {
            "--home": home,
            "--port": "0",
            "--device": setting.device,
            "--base-model": base_model,
            "--placement": placement,
            "--context-length": "4096",
        }
        words = (word for option in options.items() for word in option)
        process = subprocess.Popen(
            [sys.executable, "-m", "skyrl_tinker", "serve", *words],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=partial(die_with_parent, signal.SIGTERM),
        )
        assert process.stdout is not None
        try:
            line = next((line for line in process.stdout if line.startswith(_READY)), None)
            if line is None:
                raise RuntimeError(f"serve ended with {process.wait()}; its log is above")
            yield line.removeprefix(_READY).strip()
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def _adapters(server: Server) -> Iterator[Row]:
    """Train an adapter, its head included, and compare; then take a step of RL."""
    training = server.train(rank=32)
    yield from _published(server, training, "an adapter, untrained", None)
    _step(training, 2)
    yield from _published(server, training, "an adapter", 1.0)
    yield _rl_step(server, training)


def _full(server: Server) -> Iterator[Row]:
    """Do the same with all parameters."""
    training = server.train(rank=0)
    yield from _published(server, training, "all parameters, untrained", None)
    _step(training, 1)
    yield from _published(server, training, "all parameters", 1.0)


def _published(
    server: Server, training: tinker.TrainingClient, what: str, bound: float | None
) -> Iterator[Row]:
    """Save for samplers and take a token; then compare the logprobs of a prompt."""
    tokens = _tokens(64, 1)
    times = []
    for _ in range(_REPEATS):
        began = time.monotonic()
        sampler = training.save_weights_and_get_sampling_client().result()
        sampler.sample(_prompt(tokens[:8]), 1, types.SamplingParams(max_tokens=1)).result()
        times.append(time.monotonic() - began)
        _step(training, 1)
    yield server.timed(f"{what}: save until the first token", statistics.median(times), bound)
    sampler = training.save_weights_and_get_sampling_client().result()
    scored = sampler.compute_logprobs(_prompt(tokens)).result()
    output = training.forward([_datum(tokens)], "cross_entropy").result().loss_fn_outputs[0]
    gap = np.abs(np.array(scored[1:], np.float64) - output["logprobs"].to_numpy()).max()
    name = server.name(f"{what}: logprobs of samplers and trainer")
    yield at_most(name, float(gap), _GAPS[server.setting.device])


def _rl_step(server: Server, training: tinker.TrainingClient) -> Row:
    """Sample groups of answers, train on them, and say how long each took."""
    groups, size, length = (2, 4, 8) if server.setting.small else (16, 16, 256)
    began = time.monotonic()
    sampler = training.save_weights_and_get_sampling_client().result()
    saved = time.monotonic()
    params = types.SamplingParams(max_tokens=length, stop=[])
    prompts = [_tokens(32, number) for number in range(groups)]
    pending = [sampler.sample(_prompt(tokens), size, params) for tokens in prompts]
    answers = [
        (tokens, sequence)
        for tokens, future in zip(prompts, pending, strict=True)
        for sequence in future.result().sequences
    ]
    sampled = time.monotonic()
    data = [_datum([*tokens, *sequence.tokens], sequence.logprobs) for tokens, sequence in answers]
    backward = training.forward_backward(data, "importance_sampling")
    step = training.optim_step(types.AdamParams(learning_rate=_LEARNING_RATE))
    backward.result()
    step.result()
    ended = time.monotonic()
    count = sum(len(sequence.tokens) for _, sequence in answers)
    figures = {
        "s": ended - began,
        "s save": saved - began,
        "s sampling": sampled - saved,
        "s training": ended - sampled,
        "tokens": float(count),
    }
    return measured_together(server.name("an RL step"), figures)


def _turns(server: Server) -> Iterator[Row]:
    """Read how long turns took: sleep and wake of samplers, and the trainer's way off the GPU and back."""
    with urlopen(f"{server.url}/metrics", timeout=30) as answer:
        found = dict(re.findall(r"^skyrl_tinker_(turns?_\S+?) (\S+)$", answer.read().decode(), re.MULTILINE))
    spent = 0.0
    for turn in ("to_training", "to_sampling"):
        count = float(found[f"turns_{turn}"])
        spent += float(found[f"turn_seconds_{turn}"]) / max(1.0, count)
        yield require(server.name(f"turns {turn}"), count > 0, count, "> 0")
    yield server.timed("sleep and wake, mean", spent, 3.0)
    if server.setting.small:
        yield skipped(server.name("free GPU memory"), NOT_ON_CPU)
    else:
        yield _free_memory(server)


def _free_memory(server: Server) -> Row:
    """Look at the free memory of the first GPU while trainer and samplers take turns."""
    seen: list[int] = []
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.02):
            seen.append(torch.cuda.mem_get_info(0)[0])

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        _rl_step(server, server.train(rank=32))
    finally:
        done.set()
        watcher.join()
    figures = {"GB at least": min(seen) / _GB, "GB at most": max(seen) / _GB}
    return measured_together(server.name("free GPU memory during turns"), figures)


def _demo(server: Server) -> Iterator[Row]:
    """Run the example that learns from rewards, whose exit status says if it has."""
    with tempfile.TemporaryDirectory() as out:
        done = subprocess.run(
            [sys.executable, str(RL_LOOP), "--base-model", server.base_model, "--out", out],
            env=os.environ | {"TINKER_BASE_URL": server.url},
            capture_output=True,
            text=True,
            check=False,
        )
    last = (done.stdout.splitlines() or [done.stderr])[-1]
    yield require(server.name("examples/rl_loop.py"), done.returncode == 0, last, "learns")


def _step(training: tinker.TrainingClient, steps: int) -> None:
    for number in range(steps):
        backward = training.forward_backward([_datum(_tokens(64, number))], "cross_entropy")
        step = training.optim_step(types.AdamParams(learning_rate=_LEARNING_RATE))
        backward.result()
        step.result()


def _tokens(count: int, seed: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(3, 500, count).tolist()
    return tokens


def _prompt(tokens: list[int]) -> types.ModelInput:
    return types.ModelInput.from_ints(tokens)


def _datum(tokens: list[int], logprobs: list[float] | None = None) -> types.Datum:
    """Make a datum for cross_entropy; with the logprobs of its last tokens, for importance_sampling."""
    targets = np.array(tokens[1:])
    inputs = {"weights": np.ones(len(targets), np.float32)}
    if logprobs is not None:
        padded = np.zeros((2, len(targets)), np.float32)
        padded[:, -len(logprobs) :] = logprobs, np.resize([1.0, -1.0], len(logprobs))
        inputs = {"logprobs": padded[0], "advantages": padded[1]}
    arrays = {"target_tokens": targets, **inputs}
    return types.Datum(
        model_input=_prompt(tokens[:-1]),
        loss_fn_inputs={name: types.TensorData.from_numpy(array) for name, array in arrays.items()},
    )

#!/usr/bin/env python3
"""What the trainer's worker does in a second and in how much memory, without a server around it.

usage: scripts/bench/train.py [--device cpu|cuda] [--dtype float32|bfloat16] [--rounds N] [--threads N]

`memory`: what a forward_backward takes beyond what was there, by tokens of a row and by vocabulary.
`packed`: 32 sequences of 16 to 512 tokens, forward_backward and optim_step of a LoRA of rank 32 (attention
and MLP) on a Qwen3 of 30 M parameters, against a loop that pads them, in turns. `tenants`: one unit of work
for 4 tenants of one short sequence each, forward_backward and optim_step, against one tenant's alone, in
aggregate tokens per second; `tenants4_vs_1` is that of 8 tokens on the model `tiny`.
Seconds are wall-clock; `cpu` is processor time of this process, which other work on the machine does not
change. Prints tables and, as its last line, one JSON object.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from naive import NaiveLoop
from serving import options_of
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils.logging import disable_progress_bar

from skyrl_tinker.domain.ids import ModelKey, RequestId
from skyrl_tinker.domain.values import AdamParams, Datum, LoraSpec, PassItem, StepItem
from skyrl_tinker.training import distributed
from skyrl_tinker.training.batching.batch import build_batch
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.memory import allocator
from skyrl_tinker.training.trainer_spec import TrainerSpec
from skyrl_tinker.training.worker import Worker

RANK = 32
MiB = 1 << 20
NAIVE_ROWS = 8  # sequences of one padded row; 32 with their whole logits take more memory than most have
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 192, "num_hidden_layers": 2, "intermediate_size": 512, "vocab_size": 512},
    "30M": {"hidden_size": 384, "num_hidden_layers": 8, "intermediate_size": 1536, "vocab_size": 32000},
    "V=32k": {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256, "vocab_size": 32000},
    "V=150k": {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256, "vocab_size": 150000},
}
HEADS = {"tiny": (6, 2, 32), "30M": (6, 2, 64), "V=32k": (4, 2, 32), "V=150k": (4, 2, 32)}
"""Query heads, key heads, their size."""
TENANT_TOKENS = (8, 32)


@dataclass(frozen=True)
class Setting:
    root: Path
    ranks: Ranks
    device: str
    dtype: str
    threads: int
    gradient_checkpointing: bool

    def worker(self, name: str, token_budget: int = 2048) -> Worker:
        spec = TrainerSpec(
            str(self.root / name),
            1,
            self.device,
            self.dtype,
            self.threads,
            token_budget,
            gradient_checkpointing=self.gradient_checkpointing,
        )
        worker = Worker(spec, 0)
        worker.attach(self.ranks)
        return worker


@dataclass
class Seconds:
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def measure(self, work: Callable[[], Any]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)

    def medians(self) -> tuple[float, float]:
        return statistics.median(self.wall), statistics.median(self.cpu)


def alternate(sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Seconds]:
    """In turns, so that what else the machine does hits all; the first round warms up."""
    found = {name: Seconds() for name in sides}
    for number in range(rounds + 1):
        for name, work in sides.items():
            (found[name] if number else Seconds()).measure(work)
    return found


# Models and data


def write_model(root: Path, name: str) -> None:
    """Write random weights."""
    heads, key_heads, size = HEADS[name]
    shape: dict[str, Any] = dict(SHAPES[name])
    config = Qwen3Config(
        **shape,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=size,
        max_position_embeddings=1 << 15,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(root / name)


def make_data(lengths: list[int], vocab: int) -> tuple[Datum, ...]:
    rng = np.random.default_rng(0)
    return tuple(
        Datum(
            rng.integers(0, vocab, length).astype(np.int32),
            rng.integers(0, vocab, length),
            {"weights": np.ones(length, np.float32)},
        )
        for length in lengths
    )


def make_step(worker: Worker, models: list[int], data: tuple[Datum, ...]) -> Callable[[], Any]:
    """Run one pass and one call of the optimizer with the same data for each model."""
    items = [
        PassItem(RequestId(f"r{model}"), ModelKey(model), data, "cross_entropy", {}, True) for model in models
    ]
    steps = [StepItem(RequestId(f"s{model}"), ModelKey(model), AdamParams(1e-4)) for model in models]

    def step() -> None:
        output = worker.run_pass(build_batch(items))
        assert not output.failures
        worker.optim_step(steps)

    return step


def create(worker: Worker, models: list[int]) -> None:
    for model in models:
        worker.create_model(ModelKey(model), LoraSpec(RANK, model, train_unembed=False))


# The measurements


def packed(setting: Setting, rounds: int) -> dict[str, float]:
    data = make_data([int(x) for x in np.random.default_rng(1).permutation(np.linspace(16, 512, 32))], 32000)
    worker = setting.worker("30M")
    create(worker, [1])
    directory = str(setting.root / "30M")
    loop = NaiveLoop(directory, setting.device, getattr(torch, setting.dtype), RANK, NAIVE_ROWS)
    sides = {"packed": make_step(worker, [1], data), "naive": lambda: loop.step(data)}
    found = {name: seconds.medians() for name, seconds in alternate(sides, rounds).items()}
    tokens = sum(len(datum.tokens) for datum in data)
    print(f"\n{'':<10}{'s':>8}{'cpu s':>8}{'tokens/s':>10}   {tokens} tokens a step")
    for name, (wall, cpu) in found.items():
        print(f"{name:<10}{wall:>8.2f}{cpu:>8.2f}{tokens / wall:>10.0f}")
    (wall, cpu), (other_wall, other_cpu) = found["packed"], found["naive"]
    return {
        "packed_vs_naive": round(other_wall / wall, 2),
        "packed_vs_naive_cpu": round(other_cpu / cpu, 2),
        "tokens_per_s": round(tokens / wall),
    }


def tenants(setting: Setting, name: str, rounds: int) -> dict[str, float]:
    worker = setting.worker(name)
    create(worker, [1, 2, 3, 4])
    summary: dict[str, float] = {}
    for tokens in TENANT_TOKENS:
        data = make_data([tokens], SHAPES[name]["vocab_size"])
        sides = {"1": make_step(worker, [1], data), "4": make_step(worker, [1, 2, 3, 4], data)}
        found = {count: seconds.medians() for count, seconds in alternate(sides, rounds).items()}
        print(f"\n{name:<10}{'ms':>8}{'cpu ms':>8}{'tokens/s':>10}   {tokens} tokens per tenant and unit")
        for count, (wall, cpu) in found.items():
            rate = tokens * int(count) / wall
            print(f"{count + ' tenants':<10}{1000 * wall:>8.1f}{1000 * cpu:>8.1f}{rate:>10.0f}")
        key = "tenants4_vs_1" if (name, tokens) == ("tiny", 8) else f"tenants4_vs_1_{name}_{tokens}"
        (wall, cpu), (wall4, cpu4) = found["1"], found["4"]
        summary |= {key: round(4 * wall / wall4, 2), f"{key}_cpu": round(4 * cpu / cpu4, 2)}
    return summary


def peaks(setting: Setting, tokens: int) -> dict[str, float]:
    """MiB beyond what was there, of rows of `tokens` and of four times as many."""
    print(f"\n{'':<10}{tokens:>12}{4 * tokens:>12}   tokens a row: MiB (whole logits alone, float32)")
    found = {}
    for name in ("V=32k", "V=150k"):
        worker = setting.worker(name, 4 * tokens)
        create(worker, [1])
        row = [(length, peak_mb(worker, name, length, setting.device)) for length in (tokens, 4 * tokens)]
        whole = [length * SHAPES[name]["vocab_size"] * 4 / MiB for length, _ in row]
        print(
            f"{name:<10}"
            + "".join(f"{mb:>5.0f} ({size:>5.0f})" for (_, mb), size in zip(row, whole, strict=True))
        )
        found[name] = [mb for _, mb in row]
    return {
        "peak_mb": round(found["V=150k"][1], 1),
        "peak_mb_quarter_tokens": round(found["V=150k"][0], 1),
        "peak_mb_v32k": round(found["V=32k"][1], 1),
        "peak_mb_v32k_quarter_tokens": round(found["V=32k"][0], 1),
    }


def peak_mb(worker: Worker, name: str, tokens: int, device: str) -> float:
    data = make_data([512] * (tokens // 512), SHAPES[name]["vocab_size"])
    step = make_step(worker, [1], data[:1])
    step()  # the optimizer's state is there from now on
    allocator.give_back()
    step = make_step(worker, [1], data)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - before) / MiB
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak: proc(5)
    before = resident("VmRSS")
    step()
    return (resident("VmHWM") - before) / MiB


def resident(key: str) -> int:
    """Bytes, of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


def measure(setting: Setting, arguments: argparse.Namespace) -> dict[str, float]:
    for name in SHAPES:
        write_model(setting.root, name)
    summary = peaks(setting, 2048)  # first: what later ones leave in the allocator would hide growth
    summary |= packed(setting, arguments.rounds)
    for name in ("30M", "tiny"):
        summary |= tenants(setting, name, 10 * arguments.rounds)
    return summary


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    arguments = parser.parse_args()
    dtype = arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32")
    torch.set_num_threads(arguments.threads)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as root:
        ranks = distributed.join(distributed.meeting_place(root), 0, 1, arguments.device, 60.0)
        setting = Setting(
            Path(root), ranks, arguments.device, dtype, arguments.threads, arguments.gradient_checkpointing
        )
        summary = measure(setting, arguments)
    dist.destroy_process_group()
    print(json.dumps(summary))


if __name__ == "__main__":
    main()

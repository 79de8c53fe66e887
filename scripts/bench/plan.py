#!/usr/bin/env python3
"""What training at the shape of Qwen3-8B would ask of a GPU and its host, measured without a GPU.

usage: scripts/bench/plan.py [--tokens N] [--tenants N] [--context N] [--liger]

The trainer's own network runs forward and backward on fake tensors, with the kernels that CUDA takes (torch's
varlen_attn and rms_norm; liger-kernel's if it is installed here, or with --liger), in bfloat16, LoRA of rank
32 on all layers.

`ops_per_row_8b`: operations dispatched for one row, by one tenant (`_8tenants`: by eight), questions about
fake tensors not counted; `ops_plain_8b`: those of the plain model of transformers, without adapters, each
token's logits whole. Counted is the second row: in the first one FSDP still allocates.
`peak_gb_8b_32k`: most bytes on one GPU of weights, adapter, gradients, moments and one row of `--context`
tokens with recomputed layers; without CUDA's own context and what its allocator wastes.
`syncs_per_pass`: how often the host would wait for the GPU in a real pass of a tiny model on the CPU, of
`--tenants` tenants in four rows: reads of values by the host (`item`, `bool`, `float`), and our own calls of
`cpu`, `tolist`, `to(device)` and `tensor(device=)` without non_blocking. The latter do nothing on a CPU, so
calls are counted; the table has their lines.
`rows_rl_8ranks`, `cost_rl_8ranks`: of 512 sequences of lognormal lengths from 200 to 8,000 tokens, on 8 ranks
in rows of 16,384: rows of the rank that has most; FLOP of the costliest of the ranks' k-th rows, which run
together, summed over k, over an eighth of all FLOP. `_on_cpu`: as a CPU would pack them.
`host_mb_load_8b_8ranks_per_rank`: 16 times the growth of a process's own memory (RssAnon) at its peak, while
it loads, as one of 8 ranks, a real base model all of whose tensors are a 16th of the 8B's; `_full`: the same
as a full copy to train. Its shard counts, which on a GPU would soon leave the host; pages of the mapped file
do not, which the ranks share.
Prints tables and, as its last line, one JSON object.
"""

import argparse
import json
import sys
import tempfile
import threading
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from serving import options_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from skyrl_tinker.domain.ids import ModelKey, RequestId
from skyrl_tinker.domain.values import Datum, LoraSpec, PassItem
from skyrl_tinker.training.batching.batch import build_batch, micro_batches
from skyrl_tinker.training.memory import row_profile
from skyrl_tinker.training.memory.dispatch_counter import DispatchCounter
from skyrl_tinker.training.memory.row_profile import FakeTrainer, RowProfile, Training
from skyrl_tinker.training.models import attention, planned_device
from skyrl_tinker.training.models.fused import liger
from skyrl_tinker.training.models.network import frozen_network, trainable_network
from skyrl_tinker.training.passes.pass_runner import PassRunner
from skyrl_tinker.training.trainer_spec import TrainerSpec
from skyrl_tinker.training.worker import Worker
from tests.support.model_configs import QWEN3_8B

SCALE = 16
"""Of a tensor of the 8B's to that of the model that is loaded."""
SIXTEENTH = QWEN3_8B | {
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 3072,
    "vocab_size": 151936 // 4,
}
TINY = QWEN3_8B | {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "vocab_size": 512,
}
LORA = LoraSpec(32, 1)


# Rows of the 8B, fake


def profile(tokens: int, tenants: int, *, recompute: int = 0, rows: int = 1) -> RowProfile:
    """Return the profile of the last of `rows` rows."""
    training = Training(QWEN3_8B, "cuda", "bfloat16", LORA, tenants)
    with row_profile.fake_ranks(1) as ranks:
        trainer = FakeTrainer(training, ranks)
        return [trainer.measure(tokens, recompute=recompute) for _ in range(rows)][-1]


def plain_operations(tokens: int) -> int:
    attention.register_planned("cuda", torch.bfloat16)
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**QWEN3_8B), dtype=torch.bfloat16)
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        with DispatchCounter() as counter:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return counter.operations


def packing() -> dict[str, float]:
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(1600), 0.8, 512).clip(200, 8000).astype(int)
    data = tuple(
        Datum(
            np.zeros(length, np.int32), np.zeros(length, np.int64), {"weights": np.ones(length, np.float32)}
        )
        for length in lengths
    )
    batch = build_batch([PassItem(RequestId("rl"), ModelKey(1), data, "cross_entropy", {}, backward=True)])
    with row_profile.fake_ranks(1) as ranks:
        network = FakeTrainer(Training(QWEN3_8B, "cuda", "bfloat16", LORA), ranks).network
    cost = network.sequence_cost(backward=True)
    mean = sum(cost.of(int(length)) for length in lengths) / 8
    print(
        f"\n{len(lengths)} sequences, {lengths.sum():,} tokens, on 8 ranks, {mean / 1e15:.2f} PFLOP on each"
    )
    print(f"{'':<8}{'rows':>6}{'costliest rank / mean':>24}{'costliest rows / mean':>24}")
    found: dict[str, float] = {}
    for device, cost_of in (("cpu", None), ("cuda", lambda *_: cost)):
        plans = micro_batches(batch, frozenset({0}), lambda key: None, 8, 16384, cost_of=cost_of)
        costs = [[sum(cost.of(int(lengths[s])) for s in micro.segments) for micro in plan] for plan in plans]
        rows, steps = len(costs[0]), sum(map(max, zip(*costs, strict=True))) / mean
        print(f"{device:<8}{rows:>6}{max(map(sum, costs)) / mean:>24.3f}{steps:>24.3f}")
        suffix = "" if device == "cuda" else "_on_cpu"
        found |= {f"rows_rl_8ranks{suffix}": rows, f"cost_rl_8ranks{suffix}": round(steps, 3)}
    return found


# A real pass


class HostWaits(TorchFunctionMode):
    """Counts copies between host and device that the host would wait for, by the line that makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: Counter[str] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.cpu, torch.Tensor.tolist) or _copies_to_device(func, args, kwargs):
            self.lines[_line()] += 1
        return func(*args, **kwargs)


class ReadLines(DispatchCounter):
    """Notes where the host reads values."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.reads
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.reads > before:
            self.lines[_line()] += 1
        return result


def _copies_to_device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    caller = sys._getframe(2).f_code.co_filename
    if kwargs.get("non_blocking") or "/skyrl_tinker/training/" not in caller:  # others' tensors are there
        return False
    if func is torch.Tensor.to:
        return "device" in kwargs or any(isinstance(arg, torch.device | str) for arg in args[1:])
    return func is torch.tensor and kwargs.get("device") is not None


def _line() -> str:
    frames = [frame for frame in traceback.extract_stack() if "/skyrl_tinker/training/" in frame.filename]
    frame = next(frame for frame in reversed(frames) if "/memory/" not in frame.filename)
    return f"{frame.filename.rpartition('/skyrl_tinker/training/')[2]}:{frame.lineno} {frame.line}"


def waits(directory: str, tenants: int, rows: int) -> Counter[str]:
    """Count those of the second of two equal passes."""
    budget = 256
    with row_profile.fake_ranks(1) as ranks:
        worker = Worker(TrainerSpec(directory, 1, "cpu", "float32", 1, budget), 0)
        worker.attach(ranks)
        for number in range(1, tenants + 1):
            worker.create_model(ModelKey(number), LORA)
        batch = row_profile.even_batch(list(worker._models), rows * budget, TINY["vocab_size"])
        runner = PassRunner(worker._base, worker._models, ranks, lambda tokens, rank: False)
        runner.execute_pass(batch, budget)
        copies, reads = HostWaits(), ReadLines()
        with planned_device.planning("cuda"), copies, reads:
            runner.execute_pass(batch, budget)
    return copies.lines + reads.lines


# Loading


def load_peak(directory: str, warm_up: str, ranks: int, full: bool) -> int:
    """Bytes by which this process grows at most while its rank, of so many, loads the model."""
    disable_progress_bar()
    torch.set_num_threads(1)
    done, samples = threading.Event(), []
    load = trainable_network if full else frozen_network

    def sample() -> None:
        while not done.wait(0.002):
            samples.append(_own_memory())

    with row_profile.fake_ranks(ranks) as group:
        load(_load_spec(warm_up, ranks), group.mesh)
        before = _own_memory()
        sampler = threading.Thread(target=sample)
        sampler.start()
        load(_load_spec(directory, ranks), group.mesh)
        done.set()
        sampler.join()
    return max(samples) - before


def _load_spec(directory: str, ranks: int) -> TrainerSpec:
    return TrainerSpec(directory, ranks, "cpu", "bfloat16", 1, 2048)


def _own_memory() -> int:
    """Bytes of this process alone: neither of files nor shared."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def write_model(directory: Path, config: dict[str, Any], dtype: torch.dtype) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype).save_pretrained(directory)
    return str(directory)


# The bench


def rows_of_8b(arguments: argparse.Namespace) -> dict[str, float]:
    tokens, tenants = arguments.tokens, arguments.tenants
    one = profile(tokens, 1, rows=2)
    many = profile(tokens, tenants, rows=2)
    plain = plain_operations(tokens)
    print(f"\n8B, a row of {tokens} tokens, forward and backward")
    print(f"{'':<28}{'operations':>12}{'reads':>8}{'saved GB':>10}{'peak GB':>10}")
    for name, found in (("one tenant", one), (f"{tenants} tenants", many)):
        memory = f"{found.saved / 1e9:>10.2f}{found.peak / 1e9:>10.2f}"
        print(f"{name:<28}{found.operations:>12}{found.reads:>8}{memory}")
    print(f"{'transformers, no adapter':<28}{plain:>12}")
    long = profile(arguments.context, 1, recompute=QWEN3_8B["num_hidden_layers"])
    total = long.weights + long.state + long.peak
    print(f"\n8B, a row of {arguments.context} tokens, layers recomputed, GB on one GPU")
    for name, size in (
        ("weights", long.weights),
        ("adapter, gradients, moments", long.state),
        ("the row, at its peak", long.peak),
        ("together", total),
    ):
        print(f"{name:<28}{size / 1e9:>12.2f}")
    return {
        "ops_per_row_8b": one.operations,
        f"ops_per_row_8b_{tenants}tenants": many.operations,
        "tenants_vs_one": round(many.operations / one.operations, 2),
        "ops_plain_8b": plain,
        "peak_gb_8b_32k": round(total / 1e9, 2),
    }


def syncs(root: Path, tenants: int) -> dict[str, float]:
    directory = write_model(root / "tiny", TINY, torch.float32)
    found = {(1, 1): waits(directory, 1, 1), (tenants, 4): waits(directory, tenants, 4)}
    print("\nwaits of the host for the device in a pass, by line of skyrl_tinker/training")
    print("".join(f"{f'{t} tenants, {rows} rows':>22}" for t, rows in found))
    for line in sorted(set().union(*found.values())):
        print("".join(f"{lines[line]:>22}" for lines in found.values()) + f"  {line}")
    totals = [lines.total() for lines in found.values()]
    print("".join(f"{total:>22}" for total in totals) + "  together")
    return {"syncs_per_pass": totals[-1], "syncs_per_pass_one_row": totals[0]}


def loading(root: Path) -> dict[str, float]:
    directory = write_model(root / "sixteenth", SIXTEENTH, torch.bfloat16)
    context = get_context("spawn")
    size = sum(path.stat().st_size for path in Path(directory).glob("*.safetensors"))
    print(
        f"\nloading {size / 1e6:.0f} MB: growth of one rank's own memory at its peak, and that times {SCALE}"
    )
    found = {}
    for ranks, full in ((1, False), (8, False), (8, True)):
        with ProcessPoolExecutor(1, mp_context=context) as pool:  # a fresh process for each
            growth = pool.submit(load_peak, directory, str(root / "tiny"), ranks, full).result()
        found[ranks, full] = round(SCALE * growth / 1e6)
        name = f"{ranks} ranks, {'full copy' if full else 'base'}"
        print(f"{name:<20}{growth / 1e6:>8.0f} MB{found[ranks, full]:>8} MB")
    key = "host_mb_load_8b_8ranks_per_rank"
    return {key: found[8, False], f"{key}_full": found[8, True]}


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--tokens", type=int, default=2048, help="of a row")
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--context", type=int, default=32768, help="tokens of the longest row")
    parser.add_argument("--liger", action="store_true", help="count its kernels, installed or not")
    arguments = parser.parse_args()
    if arguments.liger:
        setattr(liger, "installed", lambda: True)  # noqa: B010 - a function, in place of another kind of one
    disable_progress_bar()
    torch.set_num_threads(1)
    summary = rows_of_8b(arguments) | packing()
    with tempfile.TemporaryDirectory() as root:
        summary |= syncs(Path(root), arguments.tenants)
        summary |= loading(Path(root))
    print(json.dumps(summary))


if __name__ == "__main__":
    main()

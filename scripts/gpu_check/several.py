"""Several ranks, whose number divides no weight: training, publishing beside it, and one without memory.

Publishing beside training is checked on one rank, too.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from gpu_check.checks import Check
from gpu_check.cuda_ipc import Sums, described, sums
from gpu_check.forked import alone, on_ranks
from gpu_check.models import CONFIGS, make_data, make_item, write_base
from gpu_check.rows import Row, at_most, require, same, skipped
from gpu_check.setting import Setting
from gpu_check.training import FLOAT32, Task, Tenant, close, train
from skyrl_tinker.domain.ids import ModelKey, RequestId
from skyrl_tinker.domain.values import AdamParams, LoraSpec, StepItem
from skyrl_tinker.training.batching.batch import TrainingInputBatch, build_batch
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.worker import Worker
from skyrl_tinker.weight_sync.captured_chunks import CapturedSource
from skyrl_tinker.weight_sync.chunk_buffer import ChunkBuffer
from skyrl_tinker.weight_sync.cuda_ipc import update_message

ODD = 3
"""Ranks on a CPU. There are as many on GPUs as are given."""
TENANTS = {
    ModelKey(1): Tenant("LoRA of rank 3", LoraSpec(3, 1)),
    ModelKey(2): Tenant("LoRA of rank 12", LoraSpec(12, 2, train_unembed=False)),
    ModelKey(3): Tenant("full", LoraSpec(0, 3)),
}
FULL, QUIET = ModelKey(3), 10
LENGTHS = (60, 1, 90, 33, 20)
TOKEN_BUDGET = 128
PASSES, LIMIT = 4, 1 << 16


class Published(NamedTuple):
    """What a rank captured, what reached it beside training, and logprobs after it; those of a quiet twin."""

    captured: Sums
    arrived: Sums
    logprobs: np.ndarray
    quiet: np.ndarray


def checks(setting: Setting) -> list[Check]:
    ranks = ODD if setting.small else setting.ranks
    published = [Check(f"publishing on {n} ranks", partial(_publish, setting, n)) for n in sorted({1, ranks})]
    if ranks == 1:
        return [*published, Check("several ranks", _skip)]
    return [
        Check(f"{ranks} ranks", partial(_train_alike, setting, ranks)),
        *published,
        Check("a rank without memory", partial(_run_out, setting, ranks)),
    ]


def _skip() -> Iterator[Row]:
    yield skipped("several ranks", "needs --ranks")


def _train_alike(setting: Setting, ranks: int) -> Iterator[Row]:
    items = [make_item(key, make_data(LENGTHS, CONFIGS["untied"].vocab_size, int(key))) for key in TENANTS]
    with tempfile.TemporaryDirectory() as directory:
        alone(write_base, "untied", directory)
        reference = train(
            Task(setting.spec(directory, "float32", TOKEN_BUDGET, device="cpu"), TENANTS, items)
        )
        found = train(Task(setting.spec(directory, "float32", TOKEN_BUDGET, ranks=ranks), TENANTS, items))
    yield from close(f"{ranks} ranks, {setting.device} float32 to one on a cpu", found, reference)


def _on(setting: Setting, ranks: int, function: Callable[..., Any]) -> list[Any]:
    with tempfile.TemporaryDirectory() as directory:
        alone(write_base, "untied", directory)
        return on_ranks(ranks, setting.device, function, setting, directory)


def _worker(ranks: Ranks, setting: Setting, directory: str, twins: Sequence[int] = (0,)) -> Worker:
    worker = Worker(setting.spec(directory, "float32", TOKEN_BUDGET, ranks=ranks.world), ranks.rank)
    worker.attach(ranks)
    for key, tenant in TENANTS.items():
        for offset in twins:
            worker.create_model(ModelKey(key + offset), tenant.spec)
    return worker


def _batch(seed: int, offset: int = 0) -> TrainingInputBatch:
    vocab = CONFIGS["untied"].vocab_size
    return build_batch(
        [make_item(ModelKey(key + offset), make_data(LENGTHS, vocab, seed)) for key in TENANTS]
    )


# Publishing


def _publish(setting: Setting, count: int) -> Iterator[Row]:
    found: list[Published] = _on(setting, count, _publish_on_rank)
    captured = {name: checksum for rank in found for name, checksum in rank.captured.items()}
    title = f"published while training on {count} ranks"
    yield same(f"{title}: {len(captured)} tensors", all(rank.arrived == captured for rank in found))
    error = max(float(np.abs(rank.logprobs - rank.quiet).max(initial=0.0)) for rank in found)
    yield at_most(f"{title}: logprobs after it", error, FLOAT32)


def _publish_on_rank(ranks: Ranks, setting: Setting, directory: str) -> Published:
    worker = _worker(ranks, setting, directory, (0, QUIET))
    _train(worker, 0)
    worker.capture_weights({FULL: 0}, {FULL: False})
    setting.wait()
    with ThreadPoolExecutor(1) as sender:
        sent: Future[Sums] = sender.submit(_send, worker, setting.device)
        for _ in range(PASSES):
            _train(worker, 0)
    for _ in range(PASSES + 1):
        _train(worker, QUIET)
    captured = described(worker.captured_share(0).tensors)
    logprobs, quiet = (worker.run_pass(_batch(9, offset)).logprobs for offset in (0, QUIET))
    return Published(captured, sent.result(), logprobs, quiet)


def _train(worker: Worker, offset: int) -> None:
    worker.run_pass(_batch(1, offset))
    worker.optim_step([StepItem(RequestId("s"), ModelKey(key + offset), AdamParams(1e-4)) for key in TENANTS])


def _send(worker: Worker, device: str) -> Sums:
    """Read all chunks, which of several ranks each sends its own to the others, as a rank's sender does."""
    buffer = ChunkBuffer(CapturedSource(worker.captured_share(0), LIMIT, everywhere=True), device)
    arrived: dict[str, tuple[str, str]] = {}
    for index, chunk in enumerate(buffer.chunks):
        arrived |= sums(buffer.load(index), update_message(chunk, ""))
    buffer.close()
    return arrived


# A rank without memory


def _run_out(setting: Setting, count: int) -> Iterator[Row]:
    found: list[tuple[list[bool], float]] = _on(setting, count, _run_out_on_rank)
    title = f"one of {count} ranks has no memory"
    refused = all(all(each) for each, _ in found)
    yield require(f"{title}: all refuse the pass", refused, str(refused), "True")
    yield at_most(f"{title}: logprobs after it", max(error for _, error in found), 1e-6)


def _run_out_on_rank(ranks: Ranks, setting: Setting, directory: str) -> tuple[list[bool], float]:
    """Run out in forward and in backward of a layer; a pass later is as one before."""
    worker = _worker(ranks, setting, directory)
    before = worker.run_pass(_batch(1)).logprobs
    refused = []
    for in_backward in (False, True):
        hook = _Once(in_backward)
        handles = [
            network.layers[-1].register_forward_hook(hook)
            for network in (worker._base, worker._models[FULL].network)  # type: ignore[attr-defined]
            if ranks.rank == ranks.world - 1
        ]
        refused.append(worker.run_pass(_batch(2)).exhausted)
        for handle in handles:
            handle.remove()
    worker.zero_gradients(list(TENANTS))
    after = worker.run_pass(_batch(1)).logprobs
    return refused, float(np.abs(after - before).max(initial=0.0))


class _Once:
    """Hook of a layer that finds no memory when it is first asked."""

    def __init__(self, in_backward: bool) -> None:
        self._in_backward = in_backward
        self._left = 1

    def __call__(self, layer: torch.nn.Module, args: Any, output: Any) -> None:
        if not self._in_backward:
            self._run_out()
        else:
            (output if isinstance(output, torch.Tensor) else output[0]).register_hook(self._run_out)

    def _run_out(self, *_: Any) -> None:
        self._left -= 1
        if self._left == 0:
            raise torch.OutOfMemoryError("made up")

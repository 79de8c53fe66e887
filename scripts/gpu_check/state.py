"""State of the trainer: offloaded and back, saved and loaded, and left by passes that ran out of memory."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from gpu_check.checks import Check
from gpu_check.forked import alone, on_ranks
from gpu_check.models import CONFIGS, make_data, make_item, write_base
from gpu_check.rows import Row, at_most, require, same, skipped
from gpu_check.setting import NOT_ON_CPU, Setting
from skyrl_tinker.domain.ids import ModelKey, RequestId
from skyrl_tinker.domain.values import AdamParams, LoraSpec, StepItem
from skyrl_tinker.training.batching.batch import TrainingInputBatch, build_batch
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.memory import allocator
from skyrl_tinker.training.models.network import network_tensors
from skyrl_tinker.training.models.trainable_model import Part
from skyrl_tinker.training.worker import Worker

SPECS = {ModelKey(1): LoraSpec(8, 1), ModelKey(2): LoraSpec(0, 2)}
NAMES = {ModelKey(1): "LoRA", ModelKey(2): "full parameters"}
TOKEN_BUDGET = 4096
SHARES = (0.25, 0.5, 0.8)
"""Room for an exhausted pass, as a share of what it takes: it ends in forward, or as late as in backward."""

StateCheck = Callable[[Setting, Worker, Path], Iterator[Row]]


def checks(setting: Setting) -> list[Check]:
    each: dict[str, StateCheck] = {
        "offload": _offload,
        "eviction": _evict,
        "checkpoint": _checkpoint,
        "out of memory": _out_of_memory,
    }
    return [Check(name, partial(_on_one_rank, setting, check)) for name, check in each.items()]


def _on_one_rank(setting: Setting, check: StateCheck) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as directory:
        alone(write_base, _base(setting), directory)
        (rows,) = on_ranks(1, setting.device, _rows, setting, directory, check)
    yield from rows


def _rows(ranks: Ranks, setting: Setting, directory: str, check: StateCheck) -> list[Row]:
    resident = int(check is _evict)
    worker = Worker(setting.spec(directory, "bfloat16", TOKEN_BUDGET, resident_models=resident), 0)
    worker.attach(ranks)
    for key, spec in SPECS.items():
        worker.create_model(key, spec)
    worker.run_pass(_batch(setting, 200))
    worker.optim_step([StepItem(RequestId("s"), key, AdamParams(1e-3)) for key in SPECS])
    worker.run_pass(_batch(setting, 200))  # so that there are gradients, too
    return list(check(setting, worker, Path(directory)))


def _base(setting: Setting) -> str:
    return "tiny" if setting.small else "30M"


def _batch(setting: Setting, tokens: int, *, backward: bool = True) -> TrainingInputBatch:
    data = make_data((tokens, tokens // 4), CONFIGS[_base(setting)].vocab_size, 1)
    return build_batch([make_item(key, data, backward=backward) for key in SPECS])


def _offload(setting: Setting, worker: Worker, directory: Path) -> Iterator[Row]:
    probe = _batch(setting, 100, backward=False)
    logprobs = worker.run_pass(probe).logprobs
    before = _state(worker)
    held = _allocated(setting)
    worker.offload()
    if setting.small:
        yield skipped("offload: share of GPU memory left", NOT_ON_CPU)
    else:
        yield at_most("offload: share of GPU memory left", _allocated(setting) / held, 0.1)
    worker.onload()
    yield same("offload and onload: all state", _equal(_state(worker), before))
    error = abs(worker.run_pass(probe).logprobs - logprobs).max()
    yield at_most("offload and onload: error of logprobs", float(error), 1e-6)


def _evict(setting: Setting, worker: Worker, directory: Path) -> Iterator[Row]:
    """Train another adapter while one alone may be on the device, and use the first again."""
    first, second = ModelKey(1), ModelKey(9)
    before = [_local(tensor).cpu().clone() for tensor in worker._models[first].tensors()]
    held = _allocated(setting)
    worker.create_model(second, SPECS[first])
    if setting.small:
        yield skipped("eviction: GPU memory that a second adapter takes", NOT_ON_CPU)
    else:
        more = float(_allocated(setting) - held)
        yield at_most("eviction: GPU memory that a second adapter takes, bytes", more, 0.0)
    data = make_data((100,), CONFIGS[_base(setting)].vocab_size, 2)
    worker.run_pass(build_batch([make_item(second, data)]))
    worker.run_pass(build_batch([make_item(first, data, backward=False)]))
    yield same(
        "eviction: state of an adapter that was evicted", _equal([*worker._models[first].tensors()], before)
    )


def _allocated(setting: Setting) -> int:
    return 0 if setting.small else torch.cuda.memory_allocated()


def _checkpoint(setting: Setting, worker: Worker, directory: Path) -> Iterator[Row]:
    for key, spec in SPECS.items():
        target, scratch = str(directory / f"saved-{key}"), str(directory / f"scratch-{key}")
        worker.capture_state(key, 0, True)
        worker.write_state(0, scratch, target)
        fresh = ModelKey(key + 10)
        worker.create_model(fresh, spec)
        worker.load_state(fresh, target, True)
        saved, loaded = worker._models[key], worker._models[fresh]
        title = f"checkpoint of {NAMES[key]}"
        for part in (Part.WEIGHT, *saved.moments):
            yield same(f"{title}: {part}", _equal(loaded.local(part), saved.local(part)))
        yield require(f"{title}: step", loaded.step == saved.step, float(loaded.step), f"{saved.step}")


def _out_of_memory(setting: Setting, worker: Worker, directory: Path) -> Iterator[Row]:
    if setting.small:
        yield skipped("out of memory", NOT_ON_CPU)
        return
    large = _batch(setting, 3000)
    held, peak = _peak(worker, large)
    worker.zero_gradients(list(SPECS))
    worker.run_pass(_batch(setting, 200))
    before = _state(worker)
    for share in SHARES:
        title = f"out of memory with {share:.0%} of what a pass takes"
        with _limited(held + share * (peak - held)):
            refused = worker.run_pass(large)
        yield require(f"{title}: refused", refused.exhausted, str(refused.exhausted), "True")
        yield same(f"{title}: all state", _equal(_state(worker), before))
    yield require("out of memory: the pass runs later", not worker.run_pass(large).failures, "", "no failure")


def _peak(worker: Worker, batch: TrainingInputBatch) -> tuple[int, int]:
    """Return the bytes held before a pass, and the most during it."""
    allocator.give_back()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    worker.run_pass(batch)
    return held, torch.cuda.max_memory_allocated()


@contextmanager
def _limited(size: float) -> Iterator[None]:
    """Let this process have so many bytes of the GPU."""
    allocator.give_back()
    torch.cuda.set_per_process_memory_fraction(size / torch.cuda.get_device_properties(0).total_memory)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _state(worker: Worker) -> list[torch.Tensor]:
    """Copy all state to the host: the base's, and each model's."""
    tensors = [*network_tensors(worker._base)]
    for key in SPECS:
        tensors += worker._models[key].tensors()
    return [_local(tensor).cpu().clone() for tensor in tensors]


def _equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(_local(one).to(other.device), _local(other)) for one, other in pairs)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()

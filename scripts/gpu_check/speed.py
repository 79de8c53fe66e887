"""Passes of a model of the shape of Qwen3-8B, with random weights made on the device."""

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from gpu_check import kernels
from gpu_check.checks import Check
from gpu_check.models import CONFIGS, make_base, make_data, make_item
from gpu_check.rows import Row, failed, measured_together, skipped
from gpu_check.setting import Setting
from skyrl_tinker.domain.ids import ModelKey, RequestId
from skyrl_tinker.domain.values import AdamParams, LoraSpec, StepItem
from skyrl_tinker.training import distributed
from skyrl_tinker.training.batching.batch import TrainingInputBatch, build_batch
from skyrl_tinker.training.memory import allocator
from skyrl_tinker.training.models import attention
from skyrl_tinker.training.worker import Worker

RANK = 32
TENANTS = (1, 8)
ROWS, LONG = (2048, 8192, 16_384), 32_768
SMALL_ROWS, SMALL_LONG = (64,), 128
LAYERS = {False: "kept", True: "recomputed", None: "as memory allows"}
ROUNDS = 2
PEAK_FLOPS = 989e12
"""Dense bfloat16 products per second, times 2, of an H100 or H200."""
LONGEST = 10
GIB = 1 << 30


def checks(setting: Setting, *, recompute: bool | None) -> list[Check]:
    """List rows of each length, for each number of tenants; the longest one fits with recomputation only."""
    rows, long = (SMALL_ROWS, SMALL_LONG) if setting.small else (ROWS, LONG)
    speed = Speed(setting, recompute, long)
    found = [speed.check("base", speed.make_base)]
    for head, tenants in product((True, False), TENANTS):
        first = head and tenants == 1
        lengths = (*rows, long) if first and recompute is not False else rows
        found.append(speed.check(f"{tenants} tenants", speed.make_tenants, tenants, head))
        found += [speed.check(f"row of {tokens}", speed.time_row, tokens) for tokens in lengths]
        if first:
            found += [speed.check("longest kernels", speed.list_kernels, tokens) for tokens in rows[:2]]
            found.append(speed.check("step", speed.time_step, rows[0]))
        if first and recompute is None:
            break  # the others are among those with either choice
    return found


class Speed:
    """A worker, and the tenants that it has now."""

    def __init__(self, setting: Setting, recompute: bool | None, token_budget: int) -> None:
        self._setting = setting
        self._recompute = recompute
        self._config = CONFIGS["tiny" if setting.small else "8B"]
        spec = setting.spec("", "bfloat16", token_budget, recompute=recompute)
        self._worker = Worker(spec, 0)
        self._scratch = tempfile.TemporaryDirectory()
        self._keys: list[ModelKey] = []
        self._head = False
        self.title = f"{'tiny' if setting.small else '8B'}, layers {LAYERS[recompute]}"

    def check(self, name: str, function: Callable[..., Iterator[Row]], *args: Any) -> Check:
        return Check(f"{self.title}: {name}", partial(function, *args))

    def make_base(self) -> Iterator[Row]:
        device = self._setting.device
        started = time.perf_counter()
        ranks = distributed.join(distributed.meeting_place(self._scratch.name), 0, 1, device, 60.0)
        attention.register(device, torch.bfloat16, self._config)
        with torch.device(device):
            name = "tiny" if self._setting.small else "8B"
            base = make_base(name, dtype=torch.bfloat16, attn_implementation=attention.IMPLEMENTATION)
        self._worker.attach(ranks, base)
        yield measured_together(f"{self.title}: base", {"s": time.perf_counter() - started})

    def make_tenants(self, count: int, head: bool) -> Iterator[Row]:
        for key in self._keys:
            self._worker.release(key)
        self._keys, self._head = [ModelKey(number) for number in range(1, count + 1)], head
        for key in self._keys:
            self._worker.create_model(key, LoraSpec(RANK, key, train_unembed=head))
        allocator.give_back()
        yield from ()

    def time_row(self, tokens: int) -> Iterator[Row]:
        """Time passes of one row that the tenants share, each with one sequence."""
        head = "head adapted" if self._head else "head frozen"
        tenants = "1 tenant" if len(self._keys) == 1 else f"{len(self._keys)} tenants"
        title = f"{self.title}, {head}, {tenants}, row of {tokens}"
        batch = self._batch(tokens)
        if not self._setting.small:
            torch.cuda.reset_peak_memory_stats()
        if self._worker.run_pass(batch, tokens).exhausted:
            text = f"does not fit into {torch.cuda.get_device_properties(0).total_memory / GIB:.0f} GiB"
            yield skipped(title, text) if self._recompute is False else failed(title, text)
            return
        seconds = min(self._seconds(lambda: self._worker.run_pass(batch, tokens)) for _ in range(ROUNDS))
        figures = {"s": seconds, "tokens/s": tokens / seconds}
        if not self._setting.small:
            figures["% MFU"] = 100 * self._useful_products(tokens) / seconds / PEAK_FLOPS
            figures["GiB at most"] = torch.cuda.max_memory_allocated() / GIB
        ran = kernels.record(lambda: self._worker.run_pass(batch, tokens), self._setting.device)
        figures |= {"kernels": float(len(ran)), "% idle": 100 * kernels.idle_share(ran)}
        self._worker.zero_gradients(self._keys)
        yield measured_together(title, figures)

    def list_kernels(self, tokens: int) -> Iterator[Row]:
        batch = self._batch(tokens)
        ran = kernels.record(lambda: self._worker.run_pass(batch, tokens), self._setting.device)
        for name, milliseconds in kernels.longest(ran, LONGEST):
            yield measured_together(f"{self.title}, row of {tokens}: {name[:70]}", {"ms": milliseconds})

    def time_step(self, tokens: int) -> Iterator[Row]:
        """Time what follows a pass; the first step makes the moments."""
        (key,) = self._keys
        for _ in range(2):
            self._worker.run_pass(self._batch(tokens), tokens)
            steps = [StepItem(RequestId("s"), key, AdamParams(1e-4))]
            step = self._seconds(lambda steps=steps: self._worker.optim_step(steps))  # type: ignore[misc]
        yield measured_together(f"{self.title}: optim_step", {"ms": 1000 * step})
        capture = self._seconds(lambda: self._worker.capture_weights({key: 0}, {key: False}))
        self._worker.drop_captured(0)
        yield measured_together(f"{self.title}: capture_weights", {"ms": 1000 * capture})

    def _batch(self, tokens: int) -> TrainingInputBatch:
        length = tokens // len(self._keys)
        data = make_data((length,), self._config.vocab_size, 1)
        return build_batch([make_item(key, data, "importance_sampling") for key in self._keys])

    def _seconds(self, work: Callable[[], Any]) -> float:
        started = time.perf_counter()
        work()
        if not self._setting.small:
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def _useful_products(self, tokens: int) -> float:
        """Count floating-point operations that the result needs: nothing twice, and no padding.

        For each token 4 for each frozen weight but the embedding's (2 forward, 2 for the gradient of its
        input), 6 for each of its adapter's, and of causal attention in each layer 6 * length * width.
        """
        config = self._config
        base = sum(parameter.numel() for parameter in self._worker._base.parameters())
        frozen = base - (0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size)
        shapes = self._worker._models[self._keys[0]].shapes().values()
        adapter = sum(rows * columns for rows, columns in shapes)
        length = tokens // len(self._keys)
        width = config.num_attention_heads * config.head_dim * config.num_hidden_layers
        return float(tokens * (4 * frozen + 6 * adapter + 6 * length * width))

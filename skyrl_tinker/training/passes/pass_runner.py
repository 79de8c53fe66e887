"""One pass: every micro-batch forward, losses per request, backward, gradients to their models."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import Failure, Float32
from skyrl_tinker.training.batching.batch import MicroBatch, RequestInfo, TrainingInputBatch, micro_batches
from skyrl_tinker.training.batching.outputs import Metrics, RankOutput, merge_metrics
from skyrl_tinker.training.batching.packed_row import Row, Span, idle_row, make_row, model_key
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.losses.custom_bounds import seconds_left
from skyrl_tinker.training.models.full_parameter import FullModel
from skyrl_tinker.training.models.lora import LoraModel
from skyrl_tinker.training.models.network import Network
from skyrl_tinker.training.models.trainable_model import TrainableModel
from skyrl_tinker.training.passes.request_losses import RequestLoss, row_loss, whole_loss

_OVERFLOW = Failure(
    "the loss is finite, but its gradients overflow on their way through the network; the request left no "
    "gradients",
    "user",
)


@dataclass(slots=True)
class _Attempt:
    """What one run through the micro-batches found on this rank."""

    batch: TrainingInputBatch
    segments: list[int] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)
    joined: Float32 | None = None
    metrics: dict[int, Metrics] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    fixed: dict[int, torch.Tensor] = field(default_factory=dict)
    """By segment [cells]: the upstream gradients of requests whose loss is taken over all of them at once."""

    spent: dict[int, float] = field(default_factory=dict)
    """By request: seconds that its custom loss took."""

    spent_on_row: float = 0.0
    """By all custom losses of the row that is scored now."""

    def keep(self, request: int, scored: RequestLoss) -> None:
        if scored.failure is not None:
            self.failures[request] = scored.failure
        else:
            self.metrics[request] = merge_metrics(self.metrics.get(request, {}), scored.metrics)

    def seconds_left(self, request: int) -> float:
        return seconds_left(self.spent.get(request, 0.0), self.spent_on_row)

    def spend(self, request: int, seconds: float) -> None:
        self.spent[request] = self.spent.get(request, 0.0) + seconds
        self.spent_on_row += seconds


@dataclass(frozen=True, slots=True)
class PassRunner:
    """`models` is the worker's own table and changes under it."""

    base: Network
    models: Mapping[ModelKey, TrainableModel]
    ranks: Ranks

    def run(self, batch: TrainingInputBatch, budget: int) -> RankOutput:
        """`budget`: tokens per row. A request whose loss or gradient is not finite fails alone.

        The pass is then undone and run again without it, so that everyone else gets, to the last bit, what
        they would have got had it never been there. Failures are rare; the good case pays nothing. Whatever
        is raised here, every model has the gradients that it came with.
        """
        failures = self._lost(batch)
        excluded = set(failures)
        while True:
            alive = frozenset(range(len(batch.requests))) - excluded
            attempt, bad = self._try(batch, alive, budget)
            failures |= attempt.failures
            excluded |= bad
            if not any(batch.requests[index].backward for index in bad):
                for model in self._training(batch, alive):
                    model.commit()
                return _rank_output(attempt, failures)
            self._rollback(batch, alive)

    def _lost(self, batch: TrainingInputBatch) -> dict[int, Failure]:
        return {
            index: Failure(f"the trainer has no state of model {info.model}", "server")
            for index, info in enumerate(batch.requests)
            if info.model not in self.models
        }

    def _training(self, batch: TrainingInputBatch, alive: frozenset[int]) -> list[TrainableModel]:
        infos = [batch.requests[index] for index in sorted(alive)]
        return [self.models[key] for key in dict.fromkeys(info.model for info in infos if info.backward)]

    def _rollback(self, batch: TrainingInputBatch, alive: frozenset[int]) -> None:
        for model in self._training(batch, alive):
            model.rollback()

    def _agree(self, attempt: _Attempt) -> set[int]:
        """Requests that failed on any rank."""
        flags = [index in attempt.failures for index in range(len(attempt.batch.requests))]
        return {index for index, failed in enumerate(self.ranks.any_(flags)) if failed}

    def _try(
        self, batch: TrainingInputBatch, alive: frozenset[int], budget: int
    ) -> tuple[_Attempt, set[int]]:
        """And the requests that failed. The gradients are in the models, to be committed or rolled back."""
        try:
            for model in self._training(batch, alive):
                model.begin()
            attempt = self._attempt(batch, alive, budget)
            bad = self._agree(attempt) or self._overflown(attempt, alive, budget)
        except BaseException:  # whatever it is: nobody's earlier gradients may suffer
            self._rollback(batch, alive)
            raise
        return attempt, bad

    def _overflown(self, attempt: _Attempt, alive: frozenset[int], budget: int) -> set[int]:
        """Requests with a finite loss whose gradients are not, after the way through the network."""
        found: set[int] = set()
        models = self._training(attempt.batch, alive)
        flags = self.ranks.any_([not model.gradients_finite() for model in models])
        for model, bad in zip(models, flags, strict=True):
            if bad:
                found |= self._culprits(attempt.batch, model, alive, budget)
        attempt.failures |= dict.fromkeys(found, _OVERFLOW)
        return found

    def _culprits(
        self, batch: TrainingInputBatch, model: TrainableModel, alive: frozenset[int], budget: int
    ) -> set[int]:
        """Each request of the model by itself; if they overflow only together, all of them."""
        infos = batch.requests
        own = {index for index in alive if infos[index].backward and self.models[infos[index].model] is model}
        found = set()
        for index in sorted(own) if len(own) > 1 else ():
            model.rollback()
            model.begin()
            self._attempt(batch, frozenset({index}), budget)
            if any(self.ranks.any_([not model.gradients_finite()])):
                found.add(index)
        return found or own

    def _attempt(self, batch: TrainingInputBatch, alive: frozenset[int], budget: int) -> _Attempt:
        attempt = _Attempt(batch)
        self._score_whole(attempt, alive, budget)
        for micro in self._plan(batch, alive, budget):
            self._run(micro, attempt)
        attempt.joined = _join(attempt.logprobs)  # takes memory: not once gradients are committed
        return attempt

    def _plan(
        self, batch: TrainingInputBatch, alive: frozenset[int], budget: int, *, forward_only: bool = False
    ) -> list[MicroBatch]:
        """This rank's share."""
        world = self.ranks.world
        plans = micro_batches(batch, alive, self._network_key, world, budget, forward_only=forward_only)
        return plans[self.ranks.rank]

    def _network_key(self, model: ModelKey) -> ModelKey | None:
        return self.models[model].network_key

    # Micro-batches

    def _run(self, micro: MicroBatch, attempt: _Attempt) -> None:
        row, logprobs = self._forward(micro, attempt.batch)
        upstream = self._losses(attempt, row, logprobs.detach(), micro.backward)
        if micro.backward:
            torch.autograd.backward(logprobs, upstream * self._sum_factor(micro))
        attempt.segments.extend(micro.segments)
        if micro.segments:
            attempt.logprobs.append(logprobs.detach())

    def _forward(self, micro: MicroBatch, batch: TrainingInputBatch) -> tuple[Row, torch.Tensor]:
        device = self.ranks.device
        row = make_row(batch, micro.segments, device) if micro.segments else idle_row(device)
        shared = self.ranks.world > 1
        with torch.set_grad_enabled(micro.backward):
            network = self._network(micro.network)
            return row, network(row, self._adapters(micro, row), micro.backward and shared)

    def _network(self, key: ModelKey | None) -> Network:
        if key is None:
            return self.base
        model = self.models[key]
        assert isinstance(model, FullModel)
        return model.network

    def _adapters(self, micro: MicroBatch, row: Row) -> tuple[tuple[Span, LoraModel], ...]:
        if micro.network is not None:
            return ()
        found = [(span, self.models[model_key(span)]) for span in row.models]
        return tuple((span, model) for span, model in found if isinstance(model, LoraModel))

    def _sum_factor(self, micro: MicroBatch) -> float:
        """FSDP averages the gradients of sharded parameters over ranks; losses here are sums."""
        return 1.0 if micro.network is None else float(self.ranks.world)

    # Losses over whole requests

    def _score_whole(self, attempt: _Attempt, alive: frozenset[int], budget: int) -> None:
        """All their datums forward first, here and on the peers, so that the gradients of the logprobs are
        known when the rows come that are differentiated."""
        batch = attempt.batch
        whole = frozenset(index for index in alive if batch.requests[index].loss.whole_request)
        if not whole:
            return
        logprobs = torch.zeros(len(batch.targets), device=self.ranks.device)
        for micro in self._plan(batch, whole, budget, forward_only=True):
            row, found = self._forward(micro, batch)
            for span in row.datums:
                logprobs[batch.cells_of(span.owner)] = found[span.part]
        self.ranks.sum_(logprobs)  # each cell was one rank's
        for index in sorted(whole):
            self._keep_whole(attempt, index, logprobs)

    def _keep_whole(self, attempt: _Attempt, index: int, logprobs: torch.Tensor) -> None:
        """Every rank finds the same; the first one reports it."""
        scored = whole_loss(attempt.batch, index, logprobs, self._seed(attempt.batch.requests[index]))
        if scored.failure is not None or self.ranks.rank == 0:
            attempt.keep(index, scored)
        start = 0
        for segment in attempt.batch.segments_of(index):
            size = math.prod(attempt.batch.shapes[segment])
            attempt.fixed[segment] = scored.upstream[start : start + size]
            start += size

    def _losses(self, attempt: _Attempt, row: Row, logprobs: torch.Tensor, backward: bool) -> torch.Tensor:
        """Losses and metrics of the row's requests, into `attempt`; returns d(their sum)/d(logprobs), [C]."""
        upstream = torch.zeros_like(logprobs)
        attempt.spent_on_row = 0.0
        for span in row.requests:
            info = attempt.batch.requests[span.owner]
            if not info.loss.whole_request and span.owner not in attempt.failures:
                scored = self._row_loss(attempt, row, span, logprobs[span.part], backward)
                attempt.keep(span.owner, scored)
                upstream[span.part] = scored.upstream
        for datum in row.datums:
            if datum.owner in attempt.fixed:
                upstream[datum.part] = attempt.fixed[datum.owner]
        return upstream

    def _row_loss(
        self, attempt: _Attempt, row: Row, span: Span, logprobs: torch.Tensor, backward: bool
    ) -> RequestLoss:
        info = attempt.batch.requests[span.owner]
        seconds, began = attempt.seconds_left(span.owner), time.monotonic()
        scored = row_loss(attempt.batch, row, span, logprobs, self._seed(info), backward, seconds)
        if info.custom is not None:
            attempt.spend(span.owner, time.monotonic() - began)
        return scored

    def _seed(self, info: RequestInfo) -> int:
        """Of what a loss draws at random: the same whenever, and beside whomever, the request runs."""
        return (self.models[info.model].spec.seed * 1_000_003 + info.seq_id) % 2**63


def _rank_output(attempt: _Attempt, failures: Mapping[int, Failure]) -> RankOutput:
    assert attempt.joined is not None
    return RankOutput(tuple(attempt.segments), attempt.joined, attempt.metrics, failures)


def _join(logprobs: list[torch.Tensor]) -> Float32:
    return torch.cat(logprobs).cpu().numpy() if logprobs else np.empty(0, np.float32)

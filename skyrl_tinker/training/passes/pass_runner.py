"""One pass: every micro-batch forward, losses per request, backward, gradients into their models."""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import Failure, Float32
from skyrl_tinker.training.batching.batch import MicroBatch, RequestInfo, TrainingInputBatch, micro_batches
from skyrl_tinker.training.batching.even_rows import SequenceCost
from skyrl_tinker.training.batching.outputs import PassMetrics, RankOutput, merge_metrics
from skyrl_tinker.training.batching.packed_row import Row, Span, idle_row, make_row
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.losses.custom_bounds import seconds_left
from skyrl_tinker.training.memory import allocator
from skyrl_tinker.training.models.fsdp_state import dropped_gradients
from skyrl_tinker.training.models.full_parameter import FullModel
from skyrl_tinker.training.models.lora import LoraModel
from skyrl_tinker.training.models.lora_layers import Adapters
from skyrl_tinker.training.models.network import Network
from skyrl_tinker.training.models.planned_device import device_type
from skyrl_tinker.training.models.trainable_model import TrainableModel
from skyrl_tinker.training.passes.request_losses import RequestLoss, row_loss, whole_loss
from skyrl_tinker.training.shortage import Shortage

T = TypeVar("T")
_OVERFLOW = Failure(
    "the loss is finite, but its gradients overflow on their way through the network; the request left no "
    "gradients",
    "user",
)


@dataclass(slots=True)
class _Attempt:
    """Results of one run through the micro-batches on this rank."""

    batch: TrainingInputBatch
    shortage: Shortage = field(default_factory=Shortage)
    segments: list[int] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)
    joined: Float32 | None = None
    metrics: dict[int, PassMetrics] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    fixed: dict[int, torch.Tensor] = field(default_factory=dict)
    """Upstream gradients by segment [cells], of requests whose loss is taken over all datums at once."""
    spent: dict[int, float] = field(default_factory=dict)  # by request: seconds that its custom loss took
    spent_on_row: float = 0.0  # seconds that all custom losses of the current row took
    unread: list[tuple[int, RequestLoss, bool]] = field(default_factory=list)
    """Losses whose numbers are still on the device, of which requests, and whether to report metrics."""
    suspects: list[TrainableModel] = field(default_factory=list)
    """Models whose gradients, summed up, are not finite."""

    def record(self, request: int, scored: RequestLoss, *, report: bool = True) -> None:
        if scored.failure is not None:
            self.failures[request] = scored.failure
        else:
            self.unread.append((request, scored, report))

    def read(self, models: Sequence[TrainableModel], device: torch.device) -> None:
        """Read all results from the device together: failed losses, metrics, overflows, logprobs."""
        sums = [model.gradient_sum() for model in models]
        losses = [
            value for _, scored, _ in self.unread for value in (scored.finite, *scored.metrics.values())
        ]
        scalars = [scalar.to(device, torch.float64, non_blocking=True) for scalar in (*sums, *losses)]
        numbers = iter(torch.stack(scalars).tolist() if scalars else ())
        self.suspects = [model for model in models if not math.isfinite(next(numbers))]
        for request, scored, report in self.unread:
            finite, metrics = next(numbers), {name: next(numbers) for name in scored.metrics}
            if not finite:
                self.failures.setdefault(request, scored.explain())
            elif report:
                self.metrics[request] = merge_metrics(self.metrics.get(request, {}), metrics)
        parts = self.logprobs
        self.joined = torch.cat(parts).cpu().numpy() if parts else np.empty(0, np.float32)

    def seconds_left(self, request: int) -> float:
        return seconds_left(self.spent.get(request, 0.0), self.spent_on_row)

    def spend(self, request: int, seconds: float) -> None:
        self.spent[request] = self.spent.get(request, 0.0) + seconds
        self.spent_on_row += seconds


@dataclass(frozen=True, slots=True)
class PassRunner:
    """Executor of passes on one rank. `models` is the worker's table, which it changes between passes."""

    base: Network
    models: Mapping[ModelKey, TrainableModel]
    ranks: Ranks
    recomputed: Callable[[int, int], int]
    """(tokens of a row, rank of its adapters) -> layers that run again in backward, the first ones."""

    def execute_pass(self, batch: TrainingInputBatch, budget: int) -> RankOutput:
        """Execute a pass in rows of `budget` tokens; a request without finite loss and gradient fails alone.

        The pass is then undone and run again without it, so that the others' results equal, to the last bit,
        those of a pass without it. Failures are rare; a pass without failures has no extra cost. After an
        error every model has the gradients that it had before. Raises ExhaustedError, on all ranks, when
        memory runs out on one, which joins its peers' collectives for the remaining rows without computing.
        """
        failures = self._without_state(batch)
        excluded = set(failures)
        own_s: Counter[int] = Counter()
        while True:
            alive = frozenset(range(len(batch.requests))) - excluded
            attempt, bad = self._attempt_checked(batch, alive, budget)
            failures |= attempt.failures
            excluded |= bad
            own_s.update(attempt.spent)
            if not any(batch.requests[index].backward for index in bad):
                for model in self._training(batch, alive):
                    model.commit()
                assert attempt.joined is not None
                return RankOutput(tuple(attempt.segments), attempt.joined, attempt.metrics, failures, own_s)
            self._rollback(batch, alive)

    def _without_state(self, batch: TrainingInputBatch) -> dict[int, Failure]:
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

    def _agree(self, attempt: _Attempt, subjects: Sequence[T], check: Callable[[T], bool]) -> list[T]:
        """Return those for which the check is true on any rank. Raises ExhaustedError."""
        flags = [False] * len(subjects)

        def look() -> None:
            flags[:] = [check(subject) for subject in subjects]

        attempt.shortage.survive(look)
        found = attempt.shortage.agree(self.ranks, flags)
        return [subject for subject, flag in zip(subjects, found, strict=True) if flag]

    def _attempt_checked(
        self, batch: TrainingInputBatch, alive: frozenset[int], budget: int
    ) -> tuple[_Attempt, set[int]]:
        """Run an attempt; also return the requests that failed. Its gradients await commit or rollback."""
        try:
            attempt = self._attempt(batch, alive, budget)
            failed = self._agree(attempt, range(len(batch.requests)), attempt.failures.__contains__)
            bad = set(failed) or self._overflown(attempt, alive, budget)
        except BaseException:  # of any kind: earlier gradients must survive
            self._rollback(batch, alive)
            raise
        return attempt, bad

    def _overflown(self, attempt: _Attempt, alive: frozenset[int], budget: int) -> set[int]:
        """Return the requests with a finite loss whose gradients overflow in the network."""
        infos = attempt.batch.requests
        models = self._training(attempt.batch, alive)
        bad = self._not_finite(attempt, models)
        suspects = [
            index
            for index in sorted(alive)
            if infos[index].backward and self.models[infos[index].model] in bad
        ]
        overflown = self._culprits(attempt.batch, suspects, budget) or set(suspects)
        attempt.failures |= dict.fromkeys(overflown, _OVERFLOW)
        return overflown

    def _culprits(self, batch: TrainingInputBatch, suspects: Sequence[int], budget: int) -> set[int]:
        """Return the requests that overflow when run alone; of several suspects there may be none.

        A suspect's model may only have shared a row with a culprit's on a GPU: zero times infinity is NaN.
        """
        culprits = set()
        for index in suspects if len(suspects) > 1 else ():
            model = self.models[batch.requests[index].model]
            model.rollback()
            alone = self._attempt(batch, frozenset({index}), budget)
            if self._not_finite(alone, [model]):
                culprits.add(index)
        return culprits

    def _not_finite(self, attempt: _Attempt, models: Sequence[TrainableModel]) -> list[TrainableModel]:
        """Return the models with gradients that are not finite on any rank."""
        if not models:
            return []
        return self._agree(
            attempt, models, lambda model: model in attempt.suspects and not model.gradients_finite()
        )

    def _attempt(self, batch: TrainingInputBatch, alive: frozenset[int], budget: int) -> _Attempt:
        """Run the micro-batches. If memory runs out, the results are invalid, which peers do not know yet."""
        attempt = _Attempt(batch)
        models = self._training(batch, alive)
        for model in models:
            if not attempt.shortage.survive(model.begin):
                allocator.give_back()
        self._score_whole(attempt, alive, budget)
        for micro in self._plan(batch, alive, budget):
            self._run(attempt, micro, self._run_micro_batch)
        if not attempt.shortage:
            # Joining takes memory, so it comes before gradients are committed.
            attempt.shortage.survive(lambda: attempt.read(models, self.ranks.device))
        return attempt

    def _plan(
        self, batch: TrainingInputBatch, alive: frozenset[int], budget: int, *, forward_only: bool = False
    ) -> list[MicroBatch]:
        """Return this rank's micro-batches."""
        plans = micro_batches(
            batch,
            alive,
            lambda key: self.models[key].network_key,
            self.ranks.world,
            budget,
            cost_of=self._sequence_cost if device_type(self.ranks.device) == "cuda" else None,
            forward_only=forward_only,
        )
        return plans[self.ranks.rank]

    def _sequence_cost(self, key: ModelKey | None, backward: bool) -> SequenceCost:
        return self._network(key).sequence_cost(backward)

    # Micro-batches

    def _run(self, attempt: _Attempt, micro: MicroBatch, run: Callable[[_Attempt, MicroBatch], None]) -> None:
        """Run a micro-batch. Without the memory for it, only take part in its collectives, or in the rest."""
        network = self._network(micro.network)
        network.collectives.begin()
        if not attempt.shortage and not attempt.shortage.survive(lambda: run(attempt, micro)):
            network.reset()
            allocator.give_back()
            network.collectives.begin_again()
        if attempt.shortage and self.ranks.world > 1:
            with dropped_gradients(network):  # a second set of them might not fit
                run(attempt, replace(micro, segments=()))

    def _run_micro_batch(self, attempt: _Attempt, micro: MicroBatch) -> None:
        row, logprobs = self._forward(micro, attempt.batch)
        upstream = self._losses(attempt, row, logprobs.detach(), micro.backward)
        if micro.backward:
            # FSDP averages the gradients of sharded parameters over ranks; losses here are sums.
            factor = 1.0 if micro.network is None else float(self.ranks.world)
            torch.autograd.backward(logprobs, upstream * factor)
        attempt.segments.extend(micro.segments)
        if micro.segments:
            attempt.logprobs.append(logprobs.detach())

    def _forward(self, micro: MicroBatch, batch: TrainingInputBatch) -> tuple[Row, torch.Tensor]:
        device = self.ranks.device
        row = make_row(batch, micro.segments, device) if micro.segments else idle_row(device)
        shared = self.ranks.world > 1
        adapters = self._adapters(micro, row)
        recompute = self.recomputed(row.tokens.shape[1], self._rank(adapters)) if micro.backward else 0
        with torch.set_grad_enabled(micro.backward):
            network = self._network(micro.network)
            whole = micro.backward and shared
            return row, network(row, adapters, whole_backward=whole, recompute=recompute)

    def _rank(self, adapters: Adapters) -> int:
        """Return the adapter columns per token: on a GPU those of all adapters, else of the largest one."""
        ranks = [model.spec.rank for model in {model for _, model in adapters}]
        return sum(ranks) if device_type(self.ranks.device) == "cuda" else max(ranks, default=0)

    def _network(self, key: ModelKey | None) -> Network:
        if key is None:
            return self.base
        model = self.models[key]
        assert isinstance(model, FullModel)
        return model.network

    def _adapters(self, micro: MicroBatch, row: Row) -> Adapters:
        if micro.network is not None:
            return ()
        owners = [(span, self.models[ModelKey(span.owner)]) for span in row.models]
        return tuple((span, model) for span, model in owners if isinstance(model, LoraModel))

    # Losses over whole requests

    def _score_whole(self, attempt: _Attempt, alive: frozenset[int], budget: int) -> None:
        """Score losses over whole requests, with a forward pass of all their datums on all ranks first.

        So the gradients of the logprobs are known when the rows are differentiated.
        """
        batch = attempt.batch
        whole = frozenset(index for index in alive if batch.requests[index].loss.whole_request)
        if not whole:
            return
        logprobs = torch.zeros(len(batch.targets), device=self.ranks.device)

        def score(_: _Attempt, micro: MicroBatch) -> None:
            row, row_logprobs = self._forward(micro, batch)
            for span in row.datums:
                logprobs[batch.cells_of(span.owner)] = row_logprobs[span.part]

        for micro in self._plan(batch, whole, budget, forward_only=True):
            self._run(attempt, micro, score)
        self.ranks.sum_(logprobs)  # each cell is computed on one rank
        for index in sorted(whole):
            attempt.shortage.survive(partial(self._score_request, attempt, index, logprobs))

    def _score_request(self, attempt: _Attempt, index: int, logprobs: torch.Tensor) -> None:
        """Score one whole request. All ranks get the same result; rank 0 reports it."""
        scored = whole_loss(attempt.batch, index, logprobs, self._seed(attempt.batch.requests[index]))
        attempt.record(index, scored, report=self.ranks.rank == 0)
        start = 0
        for segment in attempt.batch.segments_of(index):
            size = math.prod(attempt.batch.shapes[segment])
            attempt.fixed[segment] = scored.upstream[start : start + size]
            start += size

    def _losses(self, attempt: _Attempt, row: Row, logprobs: torch.Tensor, backward: bool) -> torch.Tensor:
        """Score the row's requests into `attempt`; returns d(sum of their losses)/d(logprobs), [C]."""
        upstream = torch.zeros_like(logprobs)
        attempt.spent_on_row = 0.0
        for span in row.requests:
            info = attempt.batch.requests[span.owner]
            if not info.loss.whole_request and span.owner not in attempt.failures:
                scored = self._row_loss(attempt, row, span, logprobs[span.part], backward)
                attempt.record(span.owner, scored)
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
        """Seed of a loss's random draws: independent of when and in which batch the request runs."""
        return (self.models[info.model].spec.seed * 1_000_003 + info.seq_id) % 2**63

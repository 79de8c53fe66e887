"""One pass: every micro-batch forward, losses per request, backward, gradients to their models."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from skyrl_tinker.training.batch import MicroBatch, TrainingInputBatch, micro_batches
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.full import FullModel
from skyrl_tinker.training.lora import LoraModel
from skyrl_tinker.training.losses import LOSS_FUNCTIONS, LossTerms
from skyrl_tinker.training.model import Network
from skyrl_tinker.training.outputs import Metrics, RankOutput, merge_metrics
from skyrl_tinker.training.rows import Row, Span, idle_row, make_row, model_key
from skyrl_tinker.training.state import TrainableModel
from skyrl_tinker.wire.ids import ModelKey
from skyrl_tinker.wire.losses import LOSSES
from skyrl_tinker.wire.values import Failure


@dataclass(slots=True)
class _Attempt:
    """What one run through the micro-batches found on this rank."""

    batch: TrainingInputBatch
    segments: list[int] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)
    metrics: dict[int, Metrics] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PassRunner:
    """`models` is the worker's own table and changes under it."""

    base: Network
    models: Mapping[ModelKey, TrainableModel]
    ranks: Ranks
    budget: int  # tokens per row

    def run(self, batch: TrainingInputBatch) -> RankOutput:
        """A request whose loss or gradient is not finite fails alone.

        The pass is then undone and run again without it, so that everyone else gets, to the last bit, what
        they would have got had it never been there. Failures are rare; the good case pays nothing.
        """
        failures = self._lost(batch)
        excluded = set(failures)
        while True:
            alive = frozenset(range(len(batch.requests))) - excluded
            training = self._training(batch, alive)
            for model in training:
                model.begin()
            attempt = self._attempt(batch, alive)
            failures |= attempt.failures
            bad = self._agree(attempt)
            excluded |= bad
            if not any(batch.requests[index].backward for index in bad):
                for model in training:
                    model.commit()
                return _rank_output(attempt, failures)
            for model in training:
                model.rollback()

    def _lost(self, batch: TrainingInputBatch) -> dict[int, Failure]:
        return {
            index: Failure(f"the trainer has no state of model {info.model}", "server")
            for index, info in enumerate(batch.requests)
            if info.model not in self.models
        }

    def _training(self, batch: TrainingInputBatch, alive: frozenset[int]) -> list[TrainableModel]:
        infos = [batch.requests[index] for index in sorted(alive)]
        return [self.models[key] for key in dict.fromkeys(info.model for info in infos if info.backward)]

    def _agree(self, attempt: _Attempt) -> set[int]:
        """Requests that failed on any rank."""
        flags = [index in attempt.failures for index in range(len(attempt.batch.requests))]
        return {index for index, failed in enumerate(self.ranks.any_(flags)) if failed}

    def _attempt(self, batch: TrainingInputBatch, alive: frozenset[int]) -> _Attempt:
        attempt = _Attempt(batch)
        plans = micro_batches(batch, alive, self._network_key, self.ranks.world, self.budget)
        for micro in plans[self.ranks.rank]:
            self._run(micro, attempt)
        return attempt

    def _network_key(self, model: ModelKey) -> ModelKey | None:
        return self.models[model].network_key

    def _run(self, micro: MicroBatch, attempt: _Attempt) -> None:
        device = self.ranks.device
        row = make_row(attempt.batch, micro.segments, device) if micro.segments else idle_row(device)
        shared = self.ranks.world > 1
        with torch.set_grad_enabled(micro.backward):
            network = self._network(micro.network)
            logprobs = network(row, self._adapters(micro, row), micro.backward and shared)
        upstream = _losses(attempt, row, logprobs.detach(), micro.backward)
        if micro.backward:
            logprobs.backward(upstream * self._sum_factor(micro))
        attempt.segments.extend(micro.segments)
        if micro.segments:
            attempt.logprobs.append(logprobs.detach())

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


def _losses(attempt: _Attempt, row: Row, logprobs: torch.Tensor, backward: bool) -> torch.Tensor:
    """Losses and metrics of the row's requests, into `attempt`; returns d(sum of losses)/d(logprobs), [T]."""
    upstream = torch.zeros_like(logprobs)
    for span in row.requests:
        info = attempt.batch.requests[span.owner]
        inputs = {name: row.inputs[name][span.part] for name in LOSSES[info.loss_fn].inputs}
        leaf = logprobs[span.part].requires_grad_(backward)
        with torch.set_grad_enabled(backward):
            terms = LOSS_FUNCTIONS[info.loss_fn](leaf, inputs, info.loss_config)
        if backward:
            upstream[span.part] = torch.autograd.grad(terms.per_token.sum(), leaf)[0]
        loss = float(terms.per_token.detach().sum(dtype=torch.float64))
        if math.isfinite(loss) and bool(upstream[span.part].isfinite().all()):
            metrics = {"loss:sum": loss} | {name: float(value) for name, value in terms.metrics.items()}
            attempt.metrics[span.owner] = merge_metrics(attempt.metrics.get(span.owner, {}), metrics)
        else:
            attempt.failures[span.owner] = _not_finite(attempt.batch, row, span, terms, upstream)
    return upstream


def _not_finite(
    batch: TrainingInputBatch, row: Row, span: Span, terms: LossTerms, upstream: torch.Tensor
) -> Failure:
    """Names the first token at fault."""
    losses = terms.per_token.detach()
    offset = int((~(losses.isfinite() & upstream[span.part].isfinite())).int().argmax())
    token = span.start + offset
    datum = next(segment for segment in row.datums if segment.start <= token < segment.stop)
    return Failure(
        f"datum {batch.datum[datum.owner]}, position {token - datum.start}: expected a finite "
        f"{batch.requests[span.owner].loss_fn} loss and gradient, found loss {float(losses[offset])}, "
        f"gradient {float(upstream[token])}; the request left no gradients",
        "user",
    )


def _rank_output(attempt: _Attempt, failures: Mapping[int, Failure]) -> RankOutput:
    logprobs = torch.cat(attempt.logprobs).cpu().numpy() if attempt.logprobs else np.empty(0, np.float32)
    return RankOutput(tuple(attempt.segments), logprobs, attempt.metrics, failures)

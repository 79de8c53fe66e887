"""Costs of one packed row, forward and backward: operations, waits of the host, and memory.

A network of fake tensors has the same costs as the real one, without taking its memory or time.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import varlen as _varlen  # noqa: F401 - registers the operations below
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl_tinker.domain.ids import ModelKey, RequestId
from skyrl_tinker.domain.values import Datum, LoraSpec, PassItem
from skyrl_tinker.training.batching.batch import TrainingInputBatch, build_batch
from skyrl_tinker.training.batching.packed_row import Row, make_row
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.losses import LOSS_FUNCTIONS, LossContext
from skyrl_tinker.training.memory.dispatch_counter import DispatchCounter, Workspace
from skyrl_tinker.training.memory.offload import storages
from skyrl_tinker.training.models import attention
from skyrl_tinker.training.models.full_parameter import FullModel
from skyrl_tinker.training.models.lora import LoraModel
from skyrl_tinker.training.models.network import Network, freeze, make_trainable, network_tensors
from skyrl_tinker.training.models.planned_device import planning
from skyrl_tinker.training.models.trainable_model import TrainableModel

_FULL = LoraSpec(0, 0)


@dataclass(frozen=True, slots=True)
class Training:
    """One rank's training, whose rows are measured. `config`: the content of the model's config.json."""

    config: Mapping[str, Any]
    device: str  # cpu | cuda; decides the attention kernel
    dtype: str  # float32 | bfloat16
    lora: LoraSpec = _FULL  # of each tenant; rank 0: full parameters
    tenants: int = 1

    def with_layers(self, layers: int) -> "Training":
        changed = dict(self.config, num_hidden_layers=layers)
        if changed.get("layer_types"):
            kinds = sorted(changed["layer_types"], key="full_attention".__eq__)  # refused ones stay
            changed["layer_types"] = (kinds * layers)[:layers]
        return replace(self, config=changed)


@dataclass(frozen=True, slots=True)
class RowProfile:
    """Costs of one row. Memory in bytes, of one rank's device."""

    tokens: int
    operations: int  # that are dispatched
    reads: int  # of values by the host, which waits for them
    weights: int  # of the network, sharded
    state: int  # all else that stays between passes: gradients, moments, adapters
    saved: int  # in addition to weights and state, after the forward pass
    peak: int  # in addition to weights and state, at most


@contextmanager
def fake_ranks(world: int) -> Iterator[Ranks]:
    """Form a process group without peers, whose collectives do nothing, and be its rank 0."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield Ranks(0, world, init_device_mesh("cpu", (world,)))
    finally:
        dist.destroy_process_group()


class _BlankAdapter(LoraModel):
    """Adapter of tensors without content. To fill those of 128 experts took most of a plan's time."""

    def _initialise(self) -> None:
        pass


class FakeTrainer:
    """Network and models of one rank as tensors without content, on no device."""

    def __init__(self, training: Training, ranks: Ranks) -> None:
        """Build them. Raises StartupError for a base model that the trainer does not support."""
        dtype: torch.dtype = getattr(torch, training.dtype)
        attention.register_planned(training.device, dtype)
        self.training = training
        self._ranks = ranks
        self._mode = FakeTensorMode()
        with self._mode:
            self._models = self._make_models(dtype)

    def _make_models(self, dtype: torch.dtype) -> Mapping[ModelKey, TrainableModel]:
        training, mesh = self.training, self._ranks.mesh
        full = training.lora.rank == 0
        causal_lm = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            AutoConfig.for_model(**training.config),
            dtype=torch.float32 if full else dtype,
            attn_implementation=attention.PLANNED,
        )
        keys = [ModelKey(number) for number in range(1, training.tenants + 1)]
        if full:
            self.network = make_trainable(causal_lm, dtype, mesh)
            for parameter in self.network.parameters():
                parameter.grad = torch.zeros_like(parameter)
            return {keys[0]: FullModel(keys[0], training.lora, self.network, self._ranks, "adamw")}
        self.network = freeze(causal_lm, mesh)
        return {key: _BlankAdapter(training.lora, self.network.targets, self._ranks.device) for key in keys}

    def measure(self, tokens: int, *, recompute: int = 0, backward: bool = True) -> RowProfile:
        """Measure a row that the tenants share equally, the first `recompute` layers of which run again.

        Without `backward` it is the profile of the forward pass.
        """
        batch = even_batch(list(self._models), tokens, int(self.training.config["vocab_size"]))
        row = whole_row(batch)
        with planning(self.training.device), self._mode:
            fake = _map_tensors(row, self._mode.from_tensor)
            return measure_row(
                self.network, self._models, batch, fake, self._ranks, recompute=recompute, backward=backward
            )


def even_batch(models: Sequence[ModelKey], tokens: int, vocab: int) -> TrainingInputBatch:
    """Make one request of one datum for each model, of equal lengths; a gradient for every target."""
    rng = np.random.default_rng(0)
    length = tokens // len(models)
    return build_batch(
        [
            PassItem(
                RequestId(f"r{model}"),
                model,
                (
                    Datum(
                        rng.integers(0, vocab, length).astype(np.int32),
                        rng.integers(0, vocab, length),
                        {"weights": np.ones(length, np.float32)},
                    ),
                ),
                "cross_entropy",
                {},
                backward=True,
            )
            for model in models
        ]
    )


def whole_row(batch: TrainingInputBatch) -> Row:
    """Pack all datums of the batch into one row."""
    return make_row(batch, tuple(range(len(batch.shapes))), torch.device("cpu"))


def _map_tensors(value: Any, change: Any) -> Any:
    """Replace the tensors of a row, also those within its parts."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_tensors(each, change) for key, each in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        parts = {part.name: _map_tensors(getattr(value, part.name), change) for part in fields(value)}
        return replace(value, **parts)
    return value


def measure_row(
    network: Network,
    models: Mapping[ModelKey, TrainableModel],
    batch: TrainingInputBatch,
    row: Row,
    ranks: Ranks,
    *,
    recompute: int,
    backward: bool = True,
) -> RowProfile:
    """Run the row, real or fake, as in a pass that adds to existing gradients, and count its costs."""
    for model in models.values():
        model.has_gradients = True
        for part in model.moments:
            model.local(part)
    counter = DispatchCounter(_WORKSPACES)
    everything = list(network_tensors(network))  # sharded again
    counter.hold(storages(tensor.detach() for tensor in (*network.parameters(), *network.buffers())))
    weights = counter.live
    counter.hold(storages(everything))
    counter.hold(storages(tensor for model in models.values() for tensor in model.tensors()))
    resident = counter.live
    counter.hold(storages(_tensors(row)))
    adapters = tuple(
        (span, model) for span in row.models if isinstance(model := models[ModelKey(span.owner)], LoraModel)
    )
    with counter:
        for model in models.values():
            model.begin()
        logprobs = network(row, adapters, whole_backward=ranks.world > 1, recompute=recompute)
        saved = counter.live - resident
        if backward:
            torch.autograd.backward(logprobs, _upstream(batch, row, logprobs.detach()))
    profile = RowProfile(
        len(batch.tokens),
        counter.operations,
        counter.reads,
        weights,
        resident - weights,
        saved,
        counter.peak - resident,
    )
    del logprobs
    if not backward:
        network.reset()
    for model in models.values():
        model.rollback()
    return profile


def _tensors(row: Row) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _map_tensors(row, found.append)
    return found


def _upstream(batch: TrainingInputBatch, row: Row, logprobs: torch.Tensor) -> torch.Tensor:
    """Compute d loss / d logprobs of each request."""
    upstream = torch.zeros_like(logprobs)
    for span in row.requests:
        leaf = logprobs[span.part].requires_grad_()
        shapes = tuple(batch.shapes[segment] for segment in batch.segments_of(span.owner))
        inputs = {name: values[span.part] for name, values in row.inputs.items()}
        terms = LOSS_FUNCTIONS["cross_entropy"](leaf, LossContext(inputs, shapes, {}, 0))
        (upstream[span.part],) = torch.autograd.grad(terms.values, leaf, torch.ones_like(terms.values))
    return upstream


def _flash_backward(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *_: Any, **__: Any
) -> int:
    """Bytes within FlashAttention-2's backward (mha_varlen_bwd): dq in float32; dk and dv for each head of q.

    [T, H, D] each.
    """
    per_key = 0 if key.shape[1] == query.shape[1] else 2 * query.element_size()
    return query.numel() * (4 + per_key)


_WORKSPACES: Mapping[Any, Workspace] = {
    torch.ops.torch_attn._varlen_attn_backward.default: _flash_backward,
    torch.ops.aten._flash_attention_backward.default: _flash_backward,
}

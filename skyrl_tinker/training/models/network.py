"""The network on the workers: a transformers causal LM under FSDP2 that returns target logprobs."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig

from skyrl_tinker.errors import StartupError
from skyrl_tinker.training.batching.even_rows import SequenceCost
from skyrl_tinker.training.batching.packed_row import Row
from skyrl_tinker.training.models import (
    attention,
    expert_layers,
    fsdp_state,
    lora,
    lora_layers,
    weight_loading,
)
from skyrl_tinker.training.models.fsdp_state import RowCollectives
from skyrl_tinker.training.models.fused import fused_layers
from skyrl_tinker.training.models.logprobs import KEPT_OF_ROW, Head, shared_tokens, token_logprobs
from skyrl_tinker.training.models.lora import LoraModel
from skyrl_tinker.training.models.lora_layers import Active, Adapters, Routing
from skyrl_tinker.training.models.planned_device import device_type
from skyrl_tinker.training.trainer_spec import TrainerSpec

_UNSUPPORTED = ("final_logit_softcapping", "attn_logit_softcapping", "logit_scale")


_Forward = Callable[..., Any]


def install(layers: Sequence[nn.Module], routing: Routing) -> None:
    """Wrap the layers, before `fully_shard`: FSDP's hooks then gather the weights for both runs.

    Of each row the first layers run with checkpoints, as many as its routing says. Backward has freed all
    that the others keep before it runs the first of them again.
    """
    for number, layer in enumerate(layers):
        layer.forward = partial(_forward, layer.forward, routing, number)


def _forward(forward: _Forward, routing: Routing, number: int, *args: Any, **kwargs: Any) -> Any:
    """Run, with a checkpoint or without; layers draw no random numbers, so their state need not be kept."""
    if number >= routing.active.recompute:
        return forward(*args, **kwargs)
    routed = partial(_routed, forward, routing, routing.active)
    return checkpoint(routed, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _routed(forward: _Forward, routing: Routing, active: Any, *args: Any, **kwargs: Any) -> Any:
    """Run under the row's routing, which in backward is no longer set."""
    with routing.using(active):
        return forward(*args, **kwargs)


class Network(nn.Module):
    """Root module that FSDP wraps; its forward uses the head's weight chunk by chunk."""

    def __init__(self, causal_lm: Any) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.routing = Routing()
        self.targets = lora.find_targets(causal_lm, causal_lm.get_output_embeddings())
        lora_layers.install(causal_lm, self.targets, self.routing)
        expert_layers.install(causal_lm, self.routing)
        self.fused = fused_layers.install(causal_lm)
        self._logits_scaling = float(getattr(causal_lm.config, "logits_scaling", 1.0))  # of Granite
        self._has_run = False
        self.collectives = RowCollectives()
        self._head_name = next(target.name for target in self.targets if target.is_head)

    @property
    def layers(self) -> Sequence[nn.Module]:
        layers: nn.ModuleList = self.causal_lm.base_model.layers
        return tuple(layers)

    def sequence_cost(self, backward: bool) -> SequenceCost:
        """Count the FLOP of a sequence in a forward pass and, if there is one, its backward pass.

        [L, n] times [n, m] takes 2 L n m, so a token takes 2 for each weight of a linear layer, also of the
        head and of the experts that it chooses; the gradient of the inputs takes as much again, and that of
        the weights, if they train. Attention multiplies two pairs of matrices in forward and five in
        backward, which makes the scores again (FlashAttention-2, arXiv:2307.08691, section 4.1); each takes
        2 L^2 H d for H heads of size d, causal attention half of that. Adapters, norms and layers that are
        run again are left out, and a sliding window counts as full attention.
        """
        weights = sum(layer.inputs * layer.outputs * layer.chosen for layer in self.targets)
        heads = sum(layer.inputs for layer in self.targets if layer.leaf == "o_proj")  # H d, of all layers
        trains = any(parameter.requires_grad for parameter in self.parameters())
        return SequenceCost(
            per_token=2 * weights * (1 + backward * (1 + trains)), per_pair=heads * (2 + 5 * backward)
        )

    def reset(self) -> None:
        """Reset after a forward or backward pass that was aborted."""
        if self._has_run and isinstance(self, FSDPModule):
            fsdp_state.reset(self)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._has_run = True  # before FSDP's hooks set up the state that `reset` clears
        logprobs: torch.Tensor = super().__call__(*args, **kwargs)
        return logprobs

    def forward(
        self, row: Row, adapters: Adapters = (), *, whole_backward: bool = False, recompute: int = 0
    ) -> torch.Tensor:
        """Compute target logprobs [C] float32. The adapters' spans tile the row's datums, or there are none.

        `whole_backward`: let gradients flow down to the first layer even if no adapter needs it there, so
        that all ranks gather the same layers in backward. `recompute`: number of layers,
        the first ones, that keep their inputs only and run again in backward.
        """
        embedded = self.causal_lm.get_input_embeddings()(row.tokens)
        if whole_backward and not embedded.requires_grad:
            embedded.requires_grad_()
        with self.routing.using(Active.from_adapters(adapters, embedded, recompute, row)):
            hidden = self.causal_lm.base_model(
                inputs_embeds=embedded,
                position_ids=row.positions,
                attention_mask=None,
                use_cache=False,
                segments=row.segments,
            ).last_hidden_state.squeeze(0)
        hidden = hidden / self._logits_scaling if self._logits_scaling != 1.0 else hidden
        weight = self.causal_lm.get_output_embeddings().weight
        if adapters:
            return self._logprobs(hidden, weight, row, adapters)
        tokens = len(row.targets) if row.cell_tokens is None else len(hidden)
        return token_logprobs(hidden[:tokens], Head(weight), row.targets, row.cell_tokens)

    def _logprobs(
        self, hidden: torch.Tensor, weight: torch.Tensor, row: Row, adapters: Adapters
    ) -> torch.Tensor:
        on_gpu = device_type(hidden) == "cuda"
        groups = self._heads(adapters) if on_gpu else self._groups(adapters, shared_tokens(len(weight)))
        parts, logits = [], 0
        # Backward starts with the part made last, so that gradients add up in the order of the row.
        for group in reversed(groups):
            first, last = group[0], group[-1]
            start = adapters[first][0].start
            group_hidden = hidden[start : adapters[last][0].stop]
            cells = slice(row.requests[first].start, row.requests[last].stop)
            cell_tokens = None if row.cell_tokens is None else row.cell_tokens[cells] - start
            logits += len(group_hidden) * len(weight)
            dense = sum(len(row.requests[index]) for index in group if row.dense[index])
            parts.append(
                token_logprobs(
                    group_hidden,
                    self._head(group_hidden, weight, adapters[first][1]),
                    row.targets[cells],
                    cell_tokens,
                    keep=logits <= KEPT_OF_ROW,
                    dense=2 * dense > cells.stop - cells.start,
                    cuts=() if on_gpu else [len(adapters[index][0]) for index in group],
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts[::-1])

    def _heads(self, adapters: Adapters) -> list[list[int]]:
        """Group neighbouring requests of the row that have the same head."""

        def owner(index: int) -> LoraModel | None:
            _, model = adapters[index]
            return model if self._head_name in model.pairs else None

        return [list(group) for _, group in groupby(range(len(adapters)), key=owner)]

    def _groups(self, adapters: Adapters, limit: int) -> list[list[int]]:
        """Group requests of the row whose logprobs are computed in one call.

        These are adjacent requests without an adapted head, of at most `limit` tokens together. A single
        token stays alone: several threads would sum up its logits in another order than those of many.
        """
        groups: list[list[int]] = []
        left = 0
        for index, (span, model) in enumerate(adapters):
            fits = self._head_name not in model.pairs and len(span) > 1
            if fits and len(span) <= left:
                groups[-1].append(index)
                left -= len(span)
            else:
                groups.append([index])
                left = limit - len(span) if fits else 0
        return groups

    def _head(self, hidden: torch.Tensor, weight: torch.Tensor, model: LoraModel) -> Head:
        pair = model.pairs.get(self._head_name)
        if pair is None:
            return Head(weight)
        inner = (hidden @ lora_layers.accumulate_alone(pair.a).to(hidden.dtype).T) * model.scale
        return Head(weight, inner, lora_layers.accumulate_alone(pair.b).to(hidden.dtype))


def frozen_network(spec: TrainerSpec, mesh: DeviceMesh, causal_lm: Any = None) -> Network:
    """Make the base under all adapters: of `causal_lm`, or else that of the spec in the compute type."""
    if causal_lm is not None:
        return freeze(causal_lm, mesh)
    return _loaded(freeze(_empty(spec, getattr(torch, spec.dtype)), mesh), spec)


def freeze(causal_lm: Any, mesh: DeviceMesh) -> Network:
    """Make the base of adapters.

    A rank without peers holds it as it is: FSDP would copy every weight in each forward and backward pass.
    """
    network = _network(causal_lm)
    network.requires_grad_(False)
    if mesh.size() > 1:
        _shard(network, mesh, MixedPrecisionPolicy())
    return network


def trainable_network(spec: TrainerSpec, mesh: DeviceMesh) -> Network:
    """Load a full copy to train: float32 weights and gradients, computed in the compute type."""
    return _loaded(make_trainable(_empty(spec, torch.float32), getattr(torch, spec.dtype), mesh), spec)


def _loaded(network: Network, spec: TrainerSpec) -> Network:
    """Choose the kernels of its layers, and load its weights."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    fused_layers.log_choice(spec.device, dtype, network.causal_lm.config, network.fused)
    weight_loading.load(network.causal_lm, network, spec.directory, torch.device(spec.device))
    return network


def make_trainable(causal_lm: Any, compute: torch.dtype, mesh: DeviceMesh) -> Network:
    """Shard a copy with float32 weights, to train it."""
    network = _network(causal_lm)
    dtype = None if compute == torch.float32 else compute
    # Inputs have the compute type already: to cast them, FSDP would look through the row at each layer.
    _shard(network, mesh, MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False))
    return network


def _shard(network: Network, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Shard, and reshard after forward: a forward-only call otherwise leaves stale whole weights behind."""
    for module in (*network.layers, network):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        network.collectives.install(module)


def _empty(spec: TrainerSpec, dtype: torch.dtype) -> Any:
    """Build the base model without memory, with weights in `dtype`."""
    config = AutoConfig.from_pretrained(spec.directory, local_files_only=True)
    attention.register(spec.device, getattr(torch, spec.dtype), config)
    return weight_loading.empty_causal_lm(config, dtype, attention.IMPLEMENTATION)


def _network(causal_lm: Any) -> Network:
    """Wrap a causal LM. Raises StartupError for one that would be computed wrongly."""
    causal_lm.eval()
    _refuse_unsupported(causal_lm)
    network = Network(causal_lm)
    install(network.layers, network.routing)
    return network


def _refuse_unsupported(causal_lm: Any) -> None:
    """Raise StartupError for features that packed attention and the chunked head would compute wrongly."""
    config = causal_lm.config
    unsupported = [name for name in _UNSUPPORTED if getattr(config, name, None) not in (None, 1.0)]
    kinds = set(getattr(config, "layer_types", None) or ())
    unsupported += [f"layers of type {kind}" for kind in kinds - {"full_attention", "sliding_attention"}]
    if getattr(config, "use_bidirectional_attention", False):
        unsupported.append("bidirectional attention")
    unsupported += [f"rope type {kind}" for kind in ("dynamic", "longrope") if kind in _rope_types(config)]
    if getattr(causal_lm.get_output_embeddings(), "bias", None) is not None:
        unsupported.append("a bias of the output head")
    if getattr(config, "quantization_config", None) is not None:
        unsupported.append("quantized weights")
    if unsupported:
        raise StartupError(f"{config.architectures}: the trainer does not support {', '.join(unsupported)}")


def _rope_types(config: Any) -> set[str]:
    """Rope types, given for all layers or by layer type. Some depend on the longest sequence of the row."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return {
        entry["rope_type"]
        for entry in (parameters, *parameters.values())
        if isinstance(entry, dict) and "rope_type" in entry
    }


def network_tensors(network: nn.Module) -> Iterator[torch.Tensor]:
    """Yield shards, gradients and buffers (also those in no checkpoint), after freeing whole weights."""
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for parameter in network.parameters():
        yield parameter.detach()
        if parameter.grad is not None:
            yield parameter.grad
    yield from network.buffers()

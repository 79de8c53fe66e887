"""Gradient checkpointing (arXiv:1604.06174), by row: layers keep their inputs and run again in backward."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from skyrl_tinker.training.models.lora_layers import Routing

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

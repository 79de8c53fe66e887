"""Gradient checkpointing (arXiv:1604.06174): a layer keeps its input only and runs again in backward."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from skyrl_tinker.training.models.lora_layers import Routing

_Forward = Callable[..., Any]


def install(layers: Sequence[nn.Module], routing: Routing) -> None:
    """Before `fully_shard`: FSDP's hooks then enclose both runs, and gather the weights for each."""
    for layer in layers:
        layer.forward = partial(_forward, layer.forward, routing)


def _forward(forward: _Forward, routing: Routing, *args: Any, **kwargs: Any) -> Any:
    """Nothing here draws random numbers: their state need not be kept."""
    again = partial(_routed, forward, routing, routing.active)
    return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _routed(forward: _Forward, routing: Routing, active: Any, *args: Any, **kwargs: Any) -> Any:
    """In backward the row's routing is no longer set."""
    with routing.of(active):
        return forward(*args, **kwargs)

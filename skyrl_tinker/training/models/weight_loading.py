"""Weights of a base model from its files: every rank reads its own slices of them, into its shards."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoModelForCausalLM, PreTrainedConfig

from skyrl_tinker.domain.weight_files import weight_files
from skyrl_tinker.errors import StartupError
from skyrl_tinker.training.models import mixtures
from skyrl_tinker.training.models.mixtures import Piece


def empty_causal_lm(config: PreTrainedConfig, dtype: torch.dtype, attention: str) -> Any:
    """Build a model on the meta device: without memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation=attention
        )


def load(causal_lm: Any, root: nn.Module, directory: str, device: torch.device) -> None:
    """Give `root`, sharded on the meta device, memory on `device`, and the weights of `causal_lm` within.

    Raises StartupError, with its name, for a tensor that is missing or has another shape.
    """
    root.to_empty(device=device)
    causal_lm.tie_weights()
    for module in causal_lm.modules():
        if module._non_persistent_buffers_set:  # in no file: rotary frequencies, the scale of embeddings
            for parameter in module.parameters(recurse=False):
                parameter._is_hf_initialized = True  # else _init_weights draws values, soon overwritten
            causal_lm._init_weights(module)
    with ExitStack() as stack, torch.no_grad():
        tensors, pieces = dict(_stored(Path(directory), stack)), mixtures.find_pieces(causal_lm)
        loaded: set[int] = set()
        for name, tensor in causal_lm.state_dict(keep_vars=True).items():
            if name in tensors or id(tensor) not in loaded:  # a tied head is often not stored
                _read(name, tensor, tensors, pieces.get(name, ()))
                loaded.add(id(tensor))


def _stored(directory: Path, stack: ExitStack) -> Iterator[tuple[str, Any]]:
    """Yield name and slice of each tensor in the files, which stay open as long as the stack.

    StartupError names a file that cannot be read.
    """
    for path in weight_files(directory):
        try:
            file = stack.enter_context(safe_open(path, "pt"))
        except (OSError, SafetensorError) as error:
            raise StartupError(f"{path} of the base model cannot be read: {error}") from error
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_slice(name)


def _read(name: str, tensor: torch.Tensor, stored: dict[str, Any], pieces: Sequence[Piece]) -> None:
    local, start = local_rows(tensor)
    if not pieces:
        source = _slice_of(stored, name, tensor.shape)
        local.copy_(source[start : start + len(local)])
    for piece in pieces:
        source = _slice_of(stored, piece.name, piece.shape)
        if len(own := piece.of(local, start)):
            own.copy_(source[:])


def _slice_of(stored: dict[str, Any], name: str, shape: Sequence[int]) -> Any:
    if name not in stored:
        raise StartupError(f"the base model's files hold no tensor {name}")
    found = tuple(stored[name].get_shape())
    if found != tuple(shape):
        raise StartupError(f"tensor {name} of the base model: expected {tuple(shape)}, found {found}")
    return stored[name]


def local_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return this rank's rows, and the number of the first of them."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), 0
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local().detach(), offsets[0]

"""Layers of a transformers model, recognised by their code, that run fused kernels on CUDA."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.llama import modeling_llama
from transformers.models.olmo3 import modeling_olmo3

from skyrl_tinker.training.models.attention import shape_of
from skyrl_tinker.training.models.fused import gated_products, liger, rms_norms, rotary
from skyrl_tinker.training.models.fused.activations import kind_of

_ROTARY = "apply_rotary_pos_emb"
_NORMS = (modeling_llama.LlamaRMSNorm, modeling_olmo3.Olmo3RMSNorm)
"""Norms weight * x / rms(x), which round before or after they multiply by the weight."""
_Forward = Callable[..., Any]
_log = logging.getLogger(__name__)


def install(causal_lm: nn.Module) -> Mapping[str, int]:
    """Wrap the layers whose code equals that of Llama, Olmo 3 or Gemma 3; return the count of each kind."""
    counts: Counter[str] = Counter()
    for module in causal_lm.modules():
        for kind, fuse in _KINDS.items():
            if fused := fuse(module, module.forward):
                module.forward = fused
                counts[kind] += 1
    return counts


def log_choice(device: str, dtype: torch.dtype, config: PreTrainedConfig, counts: Mapping[str, int]) -> None:
    """Log the kernels that compute a model's layers on CUDA, after a trial of those of liger-kernel."""
    if device == "cuda":
        ours = {kind for kind, works in _BY_LIGER.items() if counts[kind] and works(config, dtype, device)}
        names = {kind: liger.name() if kind in ours else "torch" for kind in _KINDS}
        _log.info("fused: %s", ", ".join(f"{counts[kind]} {kind} by {names[kind]}" for kind in _KINDS))


def _multiplies(config: PreTrainedConfig, dtype: torch.dtype, device: str) -> bool:
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    kind = kind_of(ACT2FN[activation])
    return kind is not None and liger.multiplies(kind, config.intermediate_size, dtype, device)


def _rotates(config: PreTrainedConfig, dtype: torch.dtype, device: str) -> bool:
    return liger.rotates(shape_of(config), dtype, device)


_BY_LIGER = {"MLPs": _multiplies, "rotary embeddings": _rotates}


def _norm(module: nn.Module, plain: Any) -> _Forward | None:
    if any(_same(plain, norm.forward) for norm in _NORMS):
        return partial(rms_norms.forward, module, plain)
    if _same(plain, modeling_gemma3.Gemma3RMSNorm.forward):
        return partial(rms_norms.forward_one_plus, module, plain)
    return None


def _mlp(module: nn.Module, plain: Any) -> _Forward | None:
    same = _same(plain, modeling_llama.LlamaMLP.forward)
    return partial(gated_products.forward, module) if same else None


def _rotary(module: nn.Module, plain: Any) -> _Forward | None:
    """Copy the forward of an attention layer, with another function under the name of the embedding."""
    names = getattr(getattr(plain, "__func__", None), "__globals__", {})
    original = names.get(_ROTARY)
    if original is None or _ROTARY not in plain.__code__.co_names:
        return None
    if not _same(original, modeling_llama.apply_rotary_pos_emb):
        return None
    changed = {**names, _ROTARY: partial(rotary.apply, original)}
    copy = FunctionType(plain.__code__, changed, plain.__name__, plain.__defaults__, plain.__closure__)
    copy.__kwdefaults__ = plain.__kwdefaults__
    return MethodType(copy, module)


_KINDS = {"norms": _norm, "MLPs": _mlp, "rotary embeddings": _rotary}


def _same(one: Any, other: Any) -> bool:
    """Compare the code of two functions, ignoring the names of variables."""
    return _content(one) == _content(other)


def _content(function: Any) -> tuple[Any, ...] | None:
    code = getattr(function, "__code__", None)
    if code is None:  # wrapped already
        return None
    constants = tuple(value for value in code.co_consts if not isinstance(value, str))  # but docstrings
    return code.co_code, code.co_names, code.co_argcount, constants

"""LoRA training as one writes it with transformers alone: padded rows, whole logits, torch's AdamW."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from skyrl_tinker.domain.values import Datum

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
IGNORED = -100


class LoraLinear(nn.Module):
    """Linear layer with a LoRA: y = x W^T + (alpha / rank) (x A^T) B^T."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base
        device = base.weight.device
        self.a = nn.Parameter(torch.empty(rank, base.in_features, device=device))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank, device=device))
        nn.init.kaiming_uniform_(self.a, a=5**0.5)
        self.scale = alpha / rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = x @ self.a.to(x.dtype).T
        added: torch.Tensor = self.base(x) + self.scale * (inner @ self.b.to(x.dtype).T)
        return added


class NaiveLoop:
    """One model that takes steps on right-padded rows of `rows` sequences each."""

    def __init__(self, directory: str, device: str, dtype: torch.dtype, rank: int, rows: int) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        self._model = model.to(device).requires_grad_(False)
        for name, module in list(model.named_modules()):
            if name.rpartition(".")[2] in LAYERS:
                parent, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, LoraLinear(module, rank, 32.0))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, 1e-4, (0.9, 0.95), 1e-12, 0.0)
        self._device = device
        self._rows = rows

    def step(self, data: Sequence[Datum]) -> float:
        """Return the sum of the losses."""
        total = 0.0
        for start in range(0, len(data), self._rows):
            tokens, targets, mask = _padded(data[start : start + self._rows], self._device)
            logits = self._model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
            loss = cross_entropy(
                logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
            )
            loss.backward()
            total += loss.item()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total


def _padded(data: Sequence[Datum], device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, targets and mask, each [rows, longest] int64."""
    shape = (len(data), max(len(datum.tokens) for datum in data))
    tokens, targets, mask = np.zeros(shape, np.int64), np.full(shape, IGNORED), np.zeros(shape, np.int64)
    for row, datum in enumerate(data):
        length = len(datum.tokens)
        tokens[row, :length], targets[row, :length], mask[row, :length] = (
            datum.tokens,
            datum.target_tokens,
            1,
        )
    found = [torch.from_numpy(array).to(device) for array in (tokens, targets, mask)]
    return found[0], found[1], found[2]

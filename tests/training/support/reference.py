"""The naive way: one datum at a time, whole logits, adapters merged into the weights, torch's own AdamW."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from skyrl_tinker.domain.values import Datum

Loss = Callable[[Tensor, Mapping[str, Tensor]], Tensor]


def cross_entropy(logp: Tensor, x: Mapping[str, Tensor]) -> Tensor:
    return -(x["weights"] * logp).sum()


def importance_sampling(logp: Tensor, x: Mapping[str, Tensor]) -> Tensor:
    return -(torch.exp(logp - x["logprobs"]) * x["advantages"]).sum()


def ppo(logp: Tensor, x: Mapping[str, Tensor], low: float = 0.8, high: float = 1.2) -> Tensor:
    ratio = torch.exp(logp - x["logprobs"])
    clipped = torch.clip(ratio, low, high)
    return -torch.minimum(ratio * x["advantages"], clipped * x["advantages"]).sum()


def cispo(logp: Tensor, x: Mapping[str, Tensor], low: float = 0.0, high: float = 4.0) -> Tensor:
    ratio = torch.clip(torch.exp(logp - x["logprobs"]), low, high).detach()
    return -(ratio * logp * x["advantages"]).sum()


LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
}


def load(directory: str) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval()


def logprobs(model: torch.nn.Module, datum: Datum, merged: Mapping[str, Tensor] | None = None) -> Tensor:
    tokens = torch.tensor(datum.tokens, dtype=torch.int64)[None]
    targets = torch.tensor(datum.target_tokens)
    logits = functional_call(model, dict(merged or {}), (tokens,), tie_weights=False).logits[0]
    return logits.log_softmax(-1).gather(-1, targets.reshape(len(tokens[0]), -1)).reshape(targets.shape)


def merge(model: torch.nn.Module, adapter: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights with scale * B A added, differentiable in the adapter's tensors (PEFT keys).

    The scale is 32 / rank, also of experts, which have a part of the rank.
    """
    merged: dict[str, Tensor] = {}
    rank = max(
        len(tensor)
        for key, tensor in adapter.items()
        if key.endswith(".lora_A.weight") and not key.split(".lora_")[0].endswith(_WHOLE)
    )
    for key, a in adapter.items():
        if key.endswith(".lora_A.weight"):
            name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = adapter[key.replace("lora_A", "lora_B")]
            if name.endswith(_WHOLE):
                _merge_experts(model, merged, name, a, b, 32 / rank)
            elif ".experts." in name:
                _merge_expert(model, merged, name, b @ a * 32 / rank)
            else:
                merged[f"{name}.weight"] = model.get_submodule(name).weight.detach() + 32 / len(a) * b @ a
    return merged


_WHOLE = (".experts.base_layer", ".experts")


def _merge_experts(
    model: torch.nn.Module, merged: dict[str, Tensor], name: str, a: Tensor, b: Tensor, scale: float
) -> None:
    """Add to the tensor [experts, inputs, outputs]; A [experts * r, inputs], B [outputs, r * experts]."""
    inner = name.endswith(".base_layer")
    owner = f"{name.removesuffix('.base_layer')}.{'gate_up_proj' if inner else 'down_proj'}"
    base = model.get_parameter(owner).detach()
    delta = torch.einsum("eri,ore->eio", a.unflatten(0, (len(base), -1)), b.unflatten(1, (-1, len(base))))
    merged[owner] = base + scale * delta


def _merge_expert(model: torch.nn.Module, merged: dict[str, Tensor], name: str, delta: Tensor) -> None:
    """Add to one expert's rows of the tensor of all: `name` is mlp.experts.3.gate_proj, say."""
    mixture, expert, layer = name.rsplit(".", 2)
    owner = f"{mixture}.{'down_proj' if layer == 'down_proj' else 'gate_up_proj'}"
    whole = merged.get(owner, model.get_parameter(owner).detach())
    rows = delta.shape[0]
    padded = torch.nn.functional.pad(
        delta, (0, 0, rows, 0) if layer == "up_proj" else (0, 0, 0, whole.shape[1] - rows)
    )
    zeros = torch.zeros_like(whole[0])
    merged[owner] = whole + torch.stack(
        [padded if number == int(expert) else zeros for number in range(len(whole))]
    )


def loss_of(
    model: torch.nn.Module, data: tuple[Datum, ...], loss: Loss, merged: Mapping[str, Tensor] | None = None
) -> Tensor:
    total = torch.zeros(())
    for datum in data:
        inputs = {name: torch.tensor(array) for name, array in datum.inputs.items()}
        total = total + loss(logprobs(model, datum, merged), inputs)
    return total


def adapter_gradients(
    directory: str, adapter: Mapping[str, Tensor], data: tuple[Datum, ...], loss: Loss
) -> tuple[float, dict[str, Tensor]]:
    model = load(directory).requires_grad_(False)
    leaves = {key: tensor.detach().clone().requires_grad_() for key, tensor in adapter.items()}
    total = loss_of(model, data, loss, merge(model, leaves))
    total.backward()
    return total.item(), {key: leaf.grad for key, leaf in leaves.items() if leaf.grad is not None}

"""Adapters as others make them: by PEFT itself."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


def save_adapter(base: str, directory: Path, dtype: torch.dtype = torch.float32, **config: Any) -> PeftModel:
    """One with random A and B, saved in `dtype`; returned as it is saved."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    peft = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in peft.named_parameters():
        if "lora_" in name:
            values = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.data = values.to(dtype).float()
    peft.save_pretrained(str(directory))
    file = directory / "adapter_model.safetensors"
    save_file({key: tensor.to(dtype) for key, tensor in load_file(file).items()}, file)
    return peft


def token_logprobs(model: torch.nn.Module, tokens: list[int], targets: list[int]) -> torch.Tensor:
    """Of each target after the tokens before it: [T] float32."""
    logits = model(torch.tensor(tokens)[None]).logits[0]
    return logits.log_softmax(-1).gather(-1, torch.tensor(targets)[:, None])[:, 0].detach()

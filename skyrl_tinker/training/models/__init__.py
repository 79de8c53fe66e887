"""The network and what is trained of it: LoRA adapters, full parameters, attention and logprobs."""

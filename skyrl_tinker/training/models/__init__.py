"""The network and its trainable models: LoRA adapters, full parameters, attention and logprobs."""

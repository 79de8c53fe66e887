"""The network and its trainable models: LoRA adapters, full parameters, attention and logprobs.

In: packed rows. Out: target logprobs; gradients in each model's own buffers. Imports `training.batching`.
"""

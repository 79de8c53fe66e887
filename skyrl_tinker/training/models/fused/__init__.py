"""Fused kernels of CUDA in place of transformers' eager code: norms, gated products, rotary embeddings.

On a CPU the network runs what transformers wrote, to the bit. What CUDA would run is known by
`models.planned_device`, so that a profile of fake tensors counts the same operations and the same memory.
"""

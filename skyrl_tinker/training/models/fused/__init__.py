"""Fused kernels of CUDA in place of transformers' eager code: norms, gated products, rotary embeddings.

On a CPU the network gives transformers' results, to the bit. Under `models.planned_device` fake tensors take
the code path of CUDA, so that their profile counts the same operations and the same memory.
"""

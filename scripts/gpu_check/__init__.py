"""Checks of the trainer on a GPU, for `scripts/gpu-check`.

Needs torch, transformers, safetensors, psutil and NumPy, and nothing else of the server. Each part is a
module with `checks`, which lists functions that yield rows; a part runs in a process of its own.
"""

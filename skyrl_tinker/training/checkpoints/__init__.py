"""Checkpoint files: written by all ranks side by side, loaded on any number of them, imported from PEFT.

In: a trainable model, a directory. Out: safetensors files and their entries of the manifest. Imports
`training.models` and `atomic_directory`.
"""

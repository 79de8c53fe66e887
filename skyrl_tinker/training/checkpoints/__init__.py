"""Checkpoint files: written by all ranks side by side, loaded on any number of them, imported from PEFT."""

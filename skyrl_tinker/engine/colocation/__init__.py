"""Colocation: trainer and samplers on the same GPUs, in alternating phases."""

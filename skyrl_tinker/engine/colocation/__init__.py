"""Colocation: trainer and samplers on the same GPUs, in alternating phases.

In: work of either side for the devices. Out: its phase, as a context manager. `phases` decides and is pure,
`placement` moves memory. Imports nothing else of the engine.
"""

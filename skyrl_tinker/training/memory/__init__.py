"""Placement of state in memory: device cache, offload to the host, budget, state kept for restarts.

In: trainable models. Out: tensors on the device when they are needed, copies elsewhere. Imports
`training.models`.
"""

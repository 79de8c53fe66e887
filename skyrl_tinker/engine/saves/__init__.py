"""Saves of every kind: training checkpoints, weights for samplers, external exports.

In: save requests at their turn. Out: complete directories, with their rows and the answer in one commit.
`save_flow` is the flow that the others implement. Imports `engine.sampler` and `engine.parity`.
"""

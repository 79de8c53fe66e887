"""Optimizer steps: AdamW and Dimuon, with the clipping that both share.

In: a trainable model with gradients and its parameters of the step. Out: new values, and the norm of the
gradient. Imports `training.models`.
"""

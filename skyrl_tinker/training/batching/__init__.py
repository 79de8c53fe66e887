"""Packed rows: datums of many requests under a token budget, and their outputs sorted back by request.

In: datums as numpy arrays. Out: micro-batches as tensors; outputs per request. Imports `domain` only; the
lowest layer of training.
"""

"""Comparison of trainer and samplers: the same tokens scored by both, at start and after each sync.

In: a probe of tokens. Out: the largest difference of logprobs, as a metric, a warning or a failed start.
Imports `engine.sampler`.
"""

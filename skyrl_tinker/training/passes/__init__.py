"""Forward and backward passes of one batch, with a loss per request and recovery from exhausted memory.

In: a batch. Out: logprobs and metrics per request, or its failure. Imports `training.batching`,
`training.losses` and `training.models`.
"""

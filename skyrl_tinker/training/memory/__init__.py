"""State in memory: device cache, offload to the host, budget, allocator; and costs of rows, known beforehand.

In: trainable models. Out: tensors on the device when they are needed, copies elsewhere; profiles of rows.
Imports `training.models` and `training.losses`.
"""

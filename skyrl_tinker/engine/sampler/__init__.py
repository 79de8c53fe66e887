"""The samplers' side of the engine: requests in flight, replicas, and the adapters and weights on them.

In: asample rows, published weight versions. Out: results in the outbox; leases of weights for each request
to samplers. Imports `engine.scheduling` and `engine.colocation`, `inference` and `weight_sync`.
"""

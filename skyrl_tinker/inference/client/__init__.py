"""Our side of the samplers' HTTP interface: one routed data plane, one control plane over all replicas.

In: sample requests, adapters, phases of a weight update. Out: parsed responses; a fan-out succeeds only if
every replica did. Imports `domain` and `inference.constants`.
"""

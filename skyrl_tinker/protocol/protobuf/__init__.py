"""Protobuf and JSON forms of forward_backward bodies, and protobuf forms of results.

In: bytes of a client, or values of `domain`. Out: the one canonical form that is stored, values, bytes of
results. Imports `protocol.schemas` and `domain`.
"""

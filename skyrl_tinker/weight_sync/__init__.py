"""Sync of weights into running samplers: four phases (init, start, update, finish), pluggable transports.

In: a published version's files, or ranks that send their shards. Out: replicas that serve the new version,
all of them or none. `transport` is the port, one file per transport, `factory` chooses. Imports `domain`,
`errors` and `atomic_directory` only.
"""

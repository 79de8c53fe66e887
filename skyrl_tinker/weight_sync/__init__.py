"""New weights into running samplers: four phases (init, start, update, finish) over pluggable transports.

In: a version's files, or the ranks' captured weights, read and sent in chunks by the ranks. Out: replicas
that serve the new version, all of them or none. `transport` is the interface, one file per transport,
`factory` chooses. Imports `domain`, `errors` and `atomic_directory` only.
"""

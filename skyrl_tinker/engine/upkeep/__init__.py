"""Upkeep: ends, removes and purges leftovers of clients, so that nothing grows without bound.

In: time, heartbeats, deleted checkpoints. Out: released models, freed files, deleted rows. Imports
`engine.trainer`, `engine.sampler` and `store`.
"""

"""Upkeep: what clients leave behind is ended, removed and purged, so that nothing grows without end.

In: time, heartbeats, deleted checkpoints. Out: released models, freed files, deleted rows. Imports
`engine.trainer`, `engine.sampler` and `store`.
"""

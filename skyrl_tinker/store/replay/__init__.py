"""Records for replay: the requests of each unit, their effects, and the start of replay.

In: units and snapshots of the engine. Out: the rows to replay. Imports `store.database` and `store.futures`.
"""

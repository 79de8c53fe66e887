"""Records for replay: which requests ran in one unit, what they did, and where replay begins.

In: units and snapshots of the engine. Out: the rows to replay. Imports `store.database` and `store.futures`.
"""

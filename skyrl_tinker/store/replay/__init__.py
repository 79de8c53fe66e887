"""What replay needs: which requests ran in one unit and what they did, and the snapshots from which to begin.

In: units and snapshots of the engine. Out: the rows to replay. Imports `store.database` and `store.futures`.
"""

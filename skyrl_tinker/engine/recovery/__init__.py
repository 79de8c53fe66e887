"""Return of models after a crash of anything: snapshots, from which replay goes on.

In: units that have run. Out: snapshots on disk, models on fresh ranks. Imports `engine.saves`,
`engine.scheduling` and the plain parts of `engine`.
"""

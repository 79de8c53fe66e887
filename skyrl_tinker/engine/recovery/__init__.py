"""Recovery of models after a crash of any process: snapshots, from which replay continues.

In: units that have run. Out: snapshots on disk, models on fresh ranks. Imports `engine.scheduling` and
the plain parts of `engine`.
"""

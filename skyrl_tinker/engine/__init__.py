"""The engine process: it owns all order and all state of models, and never blocks its loop.

In: rows of the journal. Out: results in the journal, rung to the API. `scheduling` decides, `trainer` and
`sampler` drive the ranks and the replicas, `saves` moves weights between them and disk. Imports `store`,
`protocol`, `domain`, `training.trainer_group`, `inference` and `weight_sync`.
"""

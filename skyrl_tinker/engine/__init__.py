"""The engine process: owns the order of all requests and the state of all models; never blocks its loop.

In: rows of the journal. Out: results in the journal, after which the API's doorbell rings. `compose` makes
the parts, `start_up` brings up the backends, `engine` runs both. `scheduling` chooses the work, `trainer` and
`sampler` drive the ranks and the replicas, `saves` moves weights between them and disk. Imports `store`,
`protocol`, `domain`, `training.trainer_group`, `inference` and `weight_sync`.
"""

"""The trainer's side of the engine: prepares passes, runs units on the ranks, creates models.

In: training rows from `intake`. Out: units run by `training.trainer_group`, results in the outbox. The top
layer of the engine below `compose`: imports `engine.saves`, `engine.parity`, `engine.scheduling` and
`engine.colocation`.
"""

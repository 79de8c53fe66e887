"""Life of a request: submitted once, read in order, finished once, fetched any number of times.

In: checked requests, results. Out: rows for the engine, outcomes for long polls. Imports `store.database`
and the records that a submission checks, or a result has: sessions, models, owners, samples.
"""

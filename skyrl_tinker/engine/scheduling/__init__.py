"""Choice of the next work: lanes by seq_id, fair shares of tenants, units of work. Pure code without I/O.

In: rows of the journal. Out: the next unit, or the next sample. Imports `store` for its row type only,
nothing else of the engine.
"""

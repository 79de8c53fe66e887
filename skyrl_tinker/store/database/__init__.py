"""Everything specific to SQLite: connections, group commit, inter-process lock, tables, migrations.

In: operations on a connection. Out: their values, after COMMIT. PostgreSQL would be a second module beside
`sqlite`. Imports `domain.ids`, `errors` and `bundled` only; the lowest layer of the store.
"""

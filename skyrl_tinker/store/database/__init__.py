"""Everything specific to SQLite: connections, group commit, inter-process lock, tables, migrations.

In: operations on a connection. Out: their values, after COMMIT. PostgreSQL would be a second module beside
`sqlite`. The lowest layer of the store: imports `domain.ids`, `errors`, `bundled` and `atomic_directory`.
"""

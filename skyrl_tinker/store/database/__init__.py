"""Everything specific to a database: connections, group commit, locks among processes, tables, migrations.

In: operations on a connection. Out: their values, after COMMIT. `abstract_database` is the interface that
SQLite and PostgreSQL have in common. The lowest layer of the store: imports `domain.ids`, `domain.units`,
`errors`, `bundled` and `atomic_directory`.
"""

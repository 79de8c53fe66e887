"""Journal shared by API and engine: a database, and a doorbell beside it.

Statements are plain functions of a connection, run by `Store.write`, `Store.read` and `Store.fetch`; a
value that `write` returned is on disk. `database` knows SQLite, `futures` is the life of a request,
`reports` the facts that the REST routes list; the other modules are records of one kind, and rules on them.
Imports `protocol`, `domain` and `errors`, and two modules without imports of their own, `bundled` and
`atomic_directory`.
"""

"""The journal that API and engine share: a database, and a doorbell beside it.

In: operations on a connection, run by `Store.read` and `Store.write`. Out: plain values; what `write`
returned is on disk. `database` knows SQLite, `futures` is the way of a request, `reports` what the REST
routes list; the other modules are one table each. Imports `protocol`, `domain` and `errors`.
"""

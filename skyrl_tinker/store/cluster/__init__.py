"""Shared parts of the hosts of one server: bells through PostgreSQL, the database's lease, signing secrets.

In: a database URL and a home. Out: wake-ups, the right to commit, secrets and tokens derived from them.
"""

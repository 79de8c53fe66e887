"""What the hosts of one server share: bells through PostgreSQL, the lease on the database, signing secrets.

In: a database URL and a home. Out: wake-ups, the right to commit, secrets and what is derived from them.
"""

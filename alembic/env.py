"""Alembic's entry: works on the connection, within the transaction, of `skyrl_tinker.store.migrate`."""

from alembic import context

from skyrl_tinker.store.tables import Base

context.configure(connection=context.config.attributes["connection"], target_metadata=Base.metadata)
context.run_migrations()

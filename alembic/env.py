"""Alembic environment: runs on the connection and transaction of `skyrl_tinker.store.database.migrate`."""

from alembic import context

from skyrl_tinker.store.database.tables import Base

context.configure(connection=context.config.attributes["connection"], target_metadata=Base.metadata)
context.run_migrations()

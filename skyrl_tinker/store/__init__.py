"""What API and engine share: a journal on a database, and a doorbell beside it."""

from skyrl_tinker.store.migrate import migrate
from skyrl_tinker.store.store import Store

__all__ = ["Store", "migrate"]

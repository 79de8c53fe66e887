"""Databases that a test of the API runs on."""

import pytest

ON_BOTH = pytest.mark.parametrize("settings", ["sqlite", "postgresql"], indirect=True)
"""Mark of a test that runs on SQLite and on PostgreSQL; others run on SQLite."""

"""Marks of tests that are about one of the databases; all others run on both."""

import pytest

on_sqlite = pytest.mark.parametrize("url", ["sqlite"], indirect=True)
on_postgresql = pytest.mark.parametrize("url", ["postgresql"], indirect=True)

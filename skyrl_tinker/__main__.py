"""`python -m skyrl_tinker`: the command line."""

from skyrl_tinker.cli.commands import app

app()

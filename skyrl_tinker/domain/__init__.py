"""Vocabulary that every part shares: identifiers, training and sampling values, loss specifications, paths.

Plain data and pure functions, without I/O. Imports `skyrl_tinker.errors` and nothing else of the project, so
that trainer ranks and samplers can use it without the web stack.
"""

"""The command line, `skyrl-tinker`: serve, engine, demo, keys, doctor and others.

In: arguments and `SKYRL_TINKER_…` variables, read into `config.Settings`. Imports any package; nothing
imports it.
"""

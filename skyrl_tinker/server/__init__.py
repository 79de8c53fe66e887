"""`serve` and its preparations: checks before the start, the base model, supervision of all children.

In: settings. Out: one API and one engine process, restarted when they die, ended together.
"""

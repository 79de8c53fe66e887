"""Base models.

The model of `serve` is found on disk, made, or fetched from the hub: its description first, the
weights by a process of their own while the API listens. `base_model` reads the facts and refuses models
that this server would compute wrongly.
"""

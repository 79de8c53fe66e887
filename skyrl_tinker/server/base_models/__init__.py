"""Base models.

What `serve` is told to serve is found on disk, made, or fetched from the hub: its description first, the
weights by a process of their own while the API listens. `base_model` reads the facts and refuses what this
server would compute wrongly.
"""

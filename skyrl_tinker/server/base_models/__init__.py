"""Base models.

Those of `serve` are found on disk, made, or fetched from the hub: the description first, the weights by a
process of its own while the API listens. `base_model` reads the facts of one and refuses models that this
server would compute wrongly, `catalog` has all.
"""

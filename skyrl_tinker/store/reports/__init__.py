"""Read-only listings for the REST routes: runs, checkpoints, sessions and storage.

In: an owner and a page. Out: values for `api.resources`. Run by `Store.fetch`, off the loop. Imports
`store.database` and the records that it lists.
"""

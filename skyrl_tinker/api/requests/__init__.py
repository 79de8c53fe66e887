"""Request bodies: read, checked and submitted to the journal.

In: a route's request. Out: a committed future, also for a request that is wrong, or a UserError. Imports
`api.services`, `protocol` and `store`.
"""

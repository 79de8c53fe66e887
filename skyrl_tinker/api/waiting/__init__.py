"""Long polls: results as they finish, and until then the reason of a request's wait.

In: request ids, and the engine's view of its queues. Out: stored results, reasons in words, 429 when too
many samples wait. Imports `protocol` and `store`.
"""

"""Bodies of REST responses, built from rows: runs, bills, traces, archives, copies.

In: rows of the store and files of checkpoints. Out: messages of `protocol.schemas`, or streams of bytes.
Imports `api.requests`, `api.security` and `api.services`.
"""

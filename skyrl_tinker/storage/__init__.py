"""Storage of checkpoints beyond this host's disk: object storage, or any file system of fsspec.

In: a checkpoint's directory. Out: the same directory, elsewhere and back. `storage_port` is the interface,
and that of a server without such storage.
"""

"""Checkpoints beyond this host's disk: in object storage, or on any file system of fsspec.

In: a checkpoint's directory. Out: the same directory, elsewhere and back.
"""

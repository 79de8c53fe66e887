"""The operating system: processes, locks, listeners, interfaces, threads, packages, whole directories.

In: paths, pids, sockets. Out: the same, so that a kill at any moment leaves nothing half done. It imports
errors only.
"""

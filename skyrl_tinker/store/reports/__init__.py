"""Read-only listings for the REST routes: runs, checkpoints, sessions, storage and timelines."""

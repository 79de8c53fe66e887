"""Units of memory."""

MiB = 1 << 20
GB = 10**9

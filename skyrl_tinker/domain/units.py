"""Units of memory."""

KiB = 1 << 10
MiB = 1 << 20
GB = 10**9

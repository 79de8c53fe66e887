"""Units of memory."""

MiB = 1 << 20

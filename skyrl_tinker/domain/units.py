"""Units of memory and time, and counts in words."""

KiB = 1 << 10
MiB = 1 << 20
GB = 10**9
_SECONDS = {"days": 86_400, "h": 3600, "min": 60, "s": 1}


def duration(seconds: float) -> str:
    """Return a duration in its largest unit that has two of them."""
    whole = round(seconds)
    unit, size = next((unit, size) for unit, size in _SECONDS.items() if whole >= 2 * size or unit == "s")
    return f"{whole // size} {unit}"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"

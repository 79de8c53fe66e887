"""Text for a terminal, which may be of others: clients name runs and write metadata, and logs repeat them."""

import shutil
import sys
from collections.abc import Iterable


def printable(text: object) -> str:
    """Return the text with control characters, line ends and changes of direction as Python escapes them."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in str(text)
    )


def width() -> int | None:
    """Return the columns of the terminal that stdout is, None if it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def show(lines: Iterable[str]) -> None:
    """Print lines, without empty ones around them."""
    print("\n".join(map(printable, lines)).strip("\n"), flush=True)


def tell(*lines: str) -> None:
    """Print a message of the command to stderr."""
    text = "\n".join(map(printable, lines))
    print(f"skyrl-tinker: {text}", file=sys.stderr, flush=True)

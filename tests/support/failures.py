"""Work that fails before it succeeds."""

from collections.abc import Callable
from typing import Any


def failing_first(work: Callable[..., Any], failures: list[Any]) -> Callable[..., Any]:
    """Return `work` as it raises the failures first, the last of them before the others."""

    def attempt(*arguments: Any, **named: Any) -> Any:
        if failures:
            raise failures.pop()
        return work(*arguments, **named)

    return attempt

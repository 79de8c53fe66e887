"""Bounds of JSON schemas of answers: samplers compile them, and answer nobody else meanwhile."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

MAX_SCHEMA = 64 * 1024
"""Most characters of a schema."""
MAX_PATTERNS = 1000
"""Most characters of the regular expressions in it, by `pattern_size`; 2000 may take three seconds."""
_MOST_TIMES = 10**6
_PART = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{(\d+)(?:,(\d*))?\}|.", re.DOTALL)


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise ValueError for a schema beyond these bounds."""
    if (size := len(orjson.dumps(schema))) > MAX_SCHEMA:
        raise ValueError(f"{size} characters, expected at most {MAX_SCHEMA}")
    if (size := sum(map(pattern_size, _patterns(schema)))) > MAX_PATTERNS:
        raise ValueError(
            f"{size} characters of regular expressions, those that repeat counted each time, "
            f"expected at most {MAX_PATTERNS}"
        )


def _patterns(value: Any) -> Iterator[str]:
    """Yield all regular expressions of a schema."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key == "pattern" and isinstance(item, str):
                yield item
            elif key == "patternProperties" and isinstance(item, Mapping):
                yield from item
            yield from _patterns(item)
    elif isinstance(value, list):
        for item in value:
            yield from _patterns(item)


def pattern_size(pattern: str) -> int:
    """Count the characters and classes of a regular expression, as often as a count repeats them."""
    groups, last = [0], 0  # sizes of the open groups, and of what a count would repeat
    for part in _PART.finditer(pattern):
        if part[0] == "(":
            groups.append(0)
            continue
        if part[0] == ")" and len(groups) > 1:
            added = last = groups.pop()
        elif part[1] is not None:
            times = max(_times(part[1]), _times(part[2] or "1"))
            added, last = last * (times - 1), last * times
        else:
            added = last = 1
        groups[-1] = min(groups[-1] + added, _MOST_TIMES**2)
        last = min(last, _MOST_TIMES**2)
    return sum(groups)


def _times(digits: str) -> int:
    return max(1, int(digits)) if len(digits) < len(str(_MOST_TIMES)) else _MOST_TIMES

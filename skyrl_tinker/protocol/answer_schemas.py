"""JSON schemas of answers: their bounds, as samplers compile few at once, and keywords that none reads.

Figures are core-seconds of xgrammar 0.2.8 with 128,000 tokens. It compiles beside the engine's loop, but
one schema at a time on two cores, and parses it where all requests are parsed.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

import orjson

from skyrl_tinker.protocol.schemas.base import MAX_JSON_INT, MIN_JSON_INT

MAX_SCHEMA = 64 * 1024
"""Most characters of a schema."""
MAX_PATTERNS = 1000
"""Most characters of the regular expressions in it, by `pattern_size`; 2000 may take three seconds."""
MAX_DIGITS = 2000
"""Most digits of ranges: 3,600 take 5 s."""
MAX_PAIRS = 20_000
"""Most pairs of optional properties of one object: 200 have as many, and take 4 s; 300 take 7 s."""
MAX_REFERENCES = 250
"""Most `$ref`: a chain with 200 takes 1 s, and one with 400 takes 7 s."""
MAX_URIS = 20
"""Most strings of format uri: each takes 0.2 s, twenty times as much as an ipv6."""
MAX_LENGTHS = 600
"""Most characters of different lengths of strings: each takes 0.09 s, equal lengths compile once."""
MAX_LENGTH = 200
"""Most characters that one length counts: from 129 on all take 18 s."""
MAX_ITEMS = 20_000
"""Most of `maxItems` in all: llguidance, of SGLang, has a symbol for each, and fails beyond 65,000."""
MAX_BRANCHES = 5000
"""Most pairs of branches of one anyOf or oneOf: 100 have as many. No compile is slow, but the engine's loop
stands still for 0.1 to 0.2 ms per branch, and each sequence, where the branches begin."""
_MOST = {
    "characters of regular expressions, those that repeat counted each time": MAX_PATTERNS,
    "digits of minimum and maximum": MAX_DIGITS,
    "pairs of optional properties of one object": MAX_PAIRS,
    "$ref": MAX_REFERENCES,
    "strings of format uri": MAX_URIS,
    f"characters of different minLength and maxLength, {MAX_LENGTH} at most of each": MAX_LENGTHS,
    "items of maxItems": MAX_ITEMS,
    "pairs of branches of one anyOf or oneOf that are no constants": MAX_BRANCHES,
}
_PATTERNS, _DIGITS, _PAIRS, _REFERENCES, _URIS, _LENGTHS, _ITEMS, _BRANCHES = _MOST
_RANGE = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_UNIONS = ("anyOf", "oneOf")
_DATA = {"const", "enum", "default", "examples", "example", "discriminator"}
_NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "schemas"}
_UNREAD = ("not", "if", "dependentRequired", "dependentSchemas", "dependencies")
_ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Keywords of which xgrammar reads the first one that a schema has, and nothing beside it."""
_RESTRICTING = _RANGE.union(
    _ALONE,
    ("type", "properties", "patternProperties", "additionalProperties", "required", "minProperties"),
    ("maxProperties", "propertyNames", "items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    ("contains", "minLength", "maxLength", "pattern", "format", "multipleOf"),
)
_TYPES: Mapping[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
_INDEX = re.compile(r"[0-9]{1,5}")
_MOST_TIMES = 10**6
_PART = re.compile(r"\\.|\[(?:[^\]\\]|\\.)*+\]?|\{(\d+)(?:,(\d*))?\}|.", re.DOTALL)
"""A class without an end is one to the end: else each `[` would search for it again."""


def with_floats(value: Any, key: str = "", *, data: bool = False) -> Any:
    """Return a schema with floats for integers of more than 64 bits, as samplers read it.

    Those stay that would change, but for bounds. `value`: also a part of one, behind `key`, and as `data` in
    a constant.
    """
    if isinstance(value, Mapping):
        return {name: with_floats(item, name, data=data or name in _DATA) for name, item in value.items()}
    if isinstance(value, list):
        return [with_floats(item, data=data) for item in value]
    if not isinstance(value, int) or MIN_JSON_INT <= value <= MAX_JSON_INT:
        return value
    is_bound = key in _RANGE and not data
    return float(value) if is_bound or value == float(value) else value


def check_schemas(*schemas: Mapping[str, Any]) -> None:
    """Raise ValueError for schemas beyond these bounds together, and for a `$ref` that leads to no schema.

    `parse_json` bounds their depth.
    """
    if (size := len(orjson.dumps(schemas))) > MAX_SCHEMA:
        raise ValueError(f"{size} characters, expected at most {MAX_SCHEMA}")
    counts: Counter[str] = Counter()
    lengths: set[tuple[float, float]] = set()
    for schema in schemas:
        for cause, count in _costs(schema, lengths):
            counts[cause] += count
    counts[_LENGTHS] = sum(int(min(max(each), MAX_LENGTH)) for each in lengths)
    counts[_REFERENCES] = sum(1 for schema in schemas for _ in _references(schema))
    for cause, most in _MOST.items():
        if counts[cause] > most:
            raise ValueError(f"{counts[cause]} {cause}, expected at most {most}")
    for schema in schemas:
        ends: set[str] = set()
        for place in _references(schema):
            _check_reference(place, schema, ends)


def require_read(schema: Mapping[str, Any]) -> None:
    """Raise ValueError for parts of a schema that grammars would not read, as if they were not there."""
    referred: dict[str, set[str]] = {}
    for part in _parts(schema):
        _check_read(part, schema, referred)


def _parts(value: Any, *, named: bool = False) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and each one in it, data left out. `named`: the value maps names to schemas."""
    if isinstance(value, Mapping):
        if not named:
            yield value
        for key, item in value.items():
            if named or key not in _DATA:
                yield from _parts(item, named=key in _NAMED and not named)
    elif isinstance(value, list):
        for item in value:
            yield from _parts(item)


def _references(schema: Mapping[str, Any]) -> Iterator[str]:
    return (part["$ref"] for part in _parts(schema) if isinstance(part.get("$ref"), str))


def _check_read(part: Mapping[str, Any], schema: Mapping[str, Any], referred: dict[str, set[str]]) -> None:
    """Raise ValueError for keywords of a part of a schema that would change nothing in the answers.

    `referred`: types of parts by their `$ref`; they are added, so that each is looked at once.
    """
    if unread := next((key for key in _UNREAD if key in part), None):
        raise ValueError(f"{unread} is not supported, expected a schema without it")
    first = next((key for key in _ALONE if key in part), None)
    beside = sorted(part.keys() & _RESTRICTING - {first})
    if first == "const" and part.get("enum") == [part["const"]]:  # as pydantic wrote a Literal once
        beside.remove("enum")
    if first is not None and beside and not (beside == ["type"] and _agrees(part, first, schema, referred)):
        raise ValueError(f"{first} beside {beside[0]}: {first} alone would be read, expected it alone")
    if first in ("anyOf", "oneOf", "allOf") and part[first] == []:
        raise ValueError(f"{first} is empty, expected at least one schema")
    names, known = part.get("required"), part.get("properties", {})
    if isinstance(names, list) and isinstance(known, Mapping):
        for name in names:
            if isinstance(name, str) and name not in known:
                raise ValueError(f"required: {name[:80]!r} is none of the properties, expected it there")


def _agrees(
    part: Mapping[str, Any], first: str, schema: Mapping[str, Any], referred: dict[str, set[str]]
) -> bool:
    """Return whether the type of a part follows from its other keyword, so that it need not be read."""
    kinds = _kinds(part)
    allowed = kinds | {"integer"} if "number" in kinds else kinds
    branches = part[first] if first.endswith("Of") else [{first: part[first]}]
    return isinstance(branches, list) and all(
        bool(found := _kinds_behind(branch, schema, referred)) and found <= allowed for branch in branches
    )


def _kinds_behind(part: Any, schema: Mapping[str, Any], referred: dict[str, set[str]]) -> set[str]:
    """Return the types of a part, those of what it refers to where it names none itself."""
    if not isinstance(part, Mapping) or "type" in part or not isinstance(place := part.get("$ref"), str):
        return _kinds(part)
    if place not in referred:
        referred[place] = _kinds(_part(place, schema))
    return referred[place]


def _kinds(part: Any) -> set[str]:
    """Return the types of a part of a schema: those that it names, or of its constants; none: not known."""
    if not isinstance(part, Mapping):
        return set()
    if "type" in part:
        named = part["type"] if isinstance(part["type"], list) else [part["type"]]
        return {kind for kind in _TYPES.values() if kind in named}
    constants = [part["const"]] if "const" in part else part.get("enum")
    return set(map(_kind_of, constants)) if isinstance(constants, list) else set()


def _kind_of(value: Any) -> str:
    return "integer" if isinstance(value, float) and value.is_integer() else _TYPES[type(value)]


def _check_reference(place: str, schema: Mapping[str, Any], ends: set[str]) -> None:
    """Raise ValueError unless a reference, and those that it leads to, end at a part of the schema.

    `ends`: those known to; these are added, so that a chain is followed once.
    """
    followed: set[str] = set()
    target: Any = {"$ref": place}
    while isinstance(target, Mapping) and isinstance(following := target.get("$ref"), str):
        if following in ends:
            break
        if following in followed:
            raise ValueError(f"$ref {place[:80]!r} leads back to itself")
        followed.add(following)
        target = _part(following, schema)
    ends |= followed


def _part(place: str, schema: Mapping[str, Any]) -> Any:
    """Return the part that a JSON pointer names (RFC 6901), in a URI's fragment."""
    first, *names = unquote(place).split("/")
    part: Any = schema if first == "#" else None
    named = False
    for name in names:
        key = name.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list):
            part, named = part[int(key)] if _INDEX.fullmatch(key) and int(key) < len(part) else None, False
        elif named or key not in _DATA:
            part = part.get(key) if isinstance(part, Mapping) else None
            named = key in _NAMED and not named
        else:
            part = None
    if part is None:
        raise ValueError(f"$ref {place[:80]!r} leads nowhere, expected '#/' and names within the schema")
    return part


def _costs(
    value: Any, lengths: set[tuple[float, float]], *, branch: bool = False
) -> Iterator[tuple[str, int]]:
    """Yield the parts of a schema that are slow to compile, each a key of _MOST with a count.

    Adds the different lengths of its strings to `lengths`. `branch`: the schema is one of an anyOf or oneOf.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _cost(key, item)
            yield from _costs(item, lengths, branch=key in _UNIONS)
        yield _PAIRS, _pairs(_optional(value.get("properties"), value.get("required")))
        if not branch:
            yield _BRANCHES, _pairs(_branches(value))
        lengths.add((_length(value.get("minLength")), _length(value.get("maxLength"))))
    elif isinstance(value, list):
        for item in value:
            yield from _costs(item, lengths, branch=branch)


def _cost(key: str, item: Any) -> Iterator[tuple[str, int]]:
    if key == "pattern" and isinstance(item, str):
        yield _PATTERNS, pattern_size(item)
    elif key == "patternProperties" and isinstance(item, Mapping):
        yield _PATTERNS, sum(map(pattern_size, item))
    elif key in _RANGE and isinstance(item, int | float):
        yield _DIGITS, len(f"{item:f}".rstrip("0").replace(".", "").replace("-", ""))
    elif key == "maxItems" and isinstance(item, int | float):
        yield _ITEMS, int(max(0, min(item, _MOST_TIMES)))
    elif key == "format" and isinstance(item, str) and item.startswith("uri"):
        yield _URIS, 1


def _pairs(count: int) -> int:
    return count * (count - 1) // 2


def _optional(properties: Any, required: Any) -> int:
    """Count the optional properties of an object: its grammar has a way from each to each later."""
    if not isinstance(properties, Mapping):
        return 0
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    return len(properties.keys() - names)


def _branches(value: Any) -> int:
    """Count what may begin where a schema does, those of branches that branch in turn included."""
    if not isinstance(value, Mapping) or "const" in value or "enum" in value:
        return 0
    inner = [item for key in _UNIONS if isinstance(each := value.get(key), list) for item in each]
    return sum(map(_branches, inner)) if inner else 1


def _length(value: Any) -> float:
    return max(value, 0) if isinstance(value, int | float) else 0


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

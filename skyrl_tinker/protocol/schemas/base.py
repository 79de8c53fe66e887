"""Base of all messages, and types of their fields."""

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain, repeat
from types import NoneType
from typing import Annotated, Any, TypeVar

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    Strict,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from skyrl_tinker.errors import UserError

MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
MIN_JSON_INT, MAX_JSON_INT = -(2**63), 2**64 - 1
"""Integers that are written as JSON exactly; readers of larger ones take the nearest float."""

T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""List of a request. Only its first wrong item is reported: a million would take gigabytes."""
StrictInt = Annotated[int, Strict()]
StrictFloat = Annotated[float, Strict()]
"""Number, also a whole one; true is none."""
WideInt = Annotated[int, Strict(), Field(ge=MIN_JSON_INT, le=MAX_JSON_INT)]
"""Of 64 bits, with a sign or without."""
TrainingSeqId = Annotated[int, Strict(), Field(ge=1, le=MAX_INT32)]
"""Contiguous per model from 1; int32, as the protobuf requests carry it."""
SessionSeqId = Annotated[int, Strict(), Field(ge=0, le=MAX_INT64)]
"""model_seq_id and sampling_session_seq_id: per session from 0."""
SampleSeqId = Annotated[int, Strict(), Field(ge=0, le=MAX_INT64)]
"""Dedupe key of a sample; clones of a sampling client use numbers up to 1e18."""


_NUMBERS = {int, float, NoneType}


def _read_numbers(values: Any) -> npt.NDArray[Any]:
    """Return [N]. Null becomes NaN, which validation refuses where it is read."""
    if not isinstance(values, list):
        raise ValueError("expected a flat list of numbers")
    types = set(map(type, values))
    if not types <= _NUMBERS:  # NumPy would read true among numbers as 1
        at = next(at for at, value in enumerate(values) if type(value) not in _NUMBERS)
        raise ValueError(f"item {at} is {shorten(values[at])}, expected a flat list of numbers")
    if NoneType in types:
        values = [math.nan if value is None else value for value in values]
    array = np.asarray(values)
    if array.dtype.kind not in "iuf":
        raise ValueError("expected numbers of at most 64 bits")
    return array


def as_integers(array: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return numbers as integers. Raises ValueError for others, and for those that floats cannot hold."""
    if array.dtype.kind == "f":
        whole = (np.abs(array) < 2.0**53) & (np.floor(array) == array)
        if not whole.all():
            at = int(whole.argmin())
            raise ValueError(f"item {at} is {array[at]}, expected a list of int64 numbers")
        return array.astype(np.int64)
    if array.dtype.kind != "i":
        raise ValueError("expected a list of int64 numbers")
    return array


Numbers = Annotated[
    Any, PlainValidator(_read_numbers), WithJsonSchema({"type": "array", "items": {"type": "number"}})
]
"""Numpy array [N] of a request, of any dtype."""
Integers = Annotated[
    Numbers, AfterValidator(as_integers), WithJsonSchema({"type": "array", "items": {"type": "integer"}})
]
"""Likewise, of int64."""


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts of a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _as_strings(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Turn values into strings, as stored: create_model accepts any JSON, the SDK reads strings only."""
    return {
        key: value if isinstance(value, str) else orjson.dumps(value).decode()
        for key, value in metadata.items()
    }


def _refuse_nul(value: T) -> T:
    if wrong := next((text for text in _texts(value) if "\0" in text), None):
        raise ValueError(f"{shorten(wrong)} has the character NUL, expected text without it")
    return value


def _long_integers(value: Any) -> Iterator[tuple[tuple[str | int, ...], int]]:
    """Yield the integers of a JSON value that need more than 64 bits, each behind the keys to it."""
    if isinstance(value, int) and not MIN_JSON_INT <= value <= MAX_JSON_INT:
        yield (), value
    elif isinstance(value, Mapping | list):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            for keys, number in _long_integers(item):
                yield (key, *keys), number


def _refuse_long_integers(value: T) -> T:
    if wrong := next(_long_integers(value), None):
        keys, number = wrong
        where = shorten(".".join(map(str, keys)))
        raise ValueError(f"{where} is {shorten(number)}, expected an integer from -2^63 to 2^64 - 1")
    return value


Text = Annotated[str, StringConstraints(max_length=512), AfterValidator(_refuse_nul)]
"""Name, path or id, which the database stores or compares, and lists repeat: PostgreSQL's has no NUL."""
Strings = Annotated[dict[str, str], BeforeValidator(_as_strings)]
"""User metadata in answers, whatever JSON it was given as."""
TextDict = Annotated[dict[str, str], Field(fail_fast=True), AfterValidator(_refuse_nul)]
JsonObject = Annotated[dict[str, Any], AfterValidator(_refuse_long_integers)]
"""Any JSON, which is stored or passed on: no integer in it becomes another number."""
NullableDict = Annotated[
    JsonObject,
    BeforeValidator(lambda value: {} if value is None else value),
    AfterValidator(_refuse_nul),
]
"""SDKs up to 0.16 send explicit nulls."""


_UNKNOWN_KEY = "unknown_key"
MOST_PROBLEMS = 5
_SHOWN = 80


class Message(BaseModel):
    """Base of messages. Unknown keys are ignored: SDKs of other versions send more or fewer."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())


class StrictMessage(Message):
    """Base of messages whose keys change a result: an unknown key is refused by name.

    An unknown key that is null counts as absent: newer SDKs may send one for each option that is not set.
    """

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, payload: Any) -> Any:
        if not isinstance(payload, Mapping) or payload.keys() <= cls.__pydantic_fields__.keys():
            return payload
        known = [field.alias or name for name, field in cls.__pydantic_fields__.items()]
        given = {key: value for key, value in payload.items() if value is not None or key in known}
        if unknown := given.keys() - set(known):
            context = {"key": shorten(min(unknown)), "known": ", ".join(known)}
            raise PydanticCustomError(_UNKNOWN_KEY, "has the unknown key {key}, expected {known}", context)
        return given


class StrictRequest(StrictMessage):
    """Base of such requests. The SDK names the request in `type`, too; it is not read."""

    type: str | None = None


class StrictQuery(StrictMessage):
    """Base of queries: an unknown filter is refused, for without it others' rows would come.

    One that is empty or false asks for nothing: newer SDKs may send it.
    """

    @model_validator(mode="before")
    @classmethod
    def _without_what_asks_for_nothing(cls, payload: Any) -> Any:
        if not isinstance(payload, Mapping):
            return payload
        known = {field.alias or name for name, field in cls.__pydantic_fields__.items()}
        return {key: value for key, value in payload.items() if key in known or value not in ("", "false")}


def fit_json(given: T) -> T:
    """Refuse integers that JSON, by which other processes get the settings, has no place for."""
    if isinstance(given, int) and given > MAX_INT64:
        raise ValueError(f"expected at most {MAX_INT64}")
    return given


class Table(BaseModel):
    """Base of settings that belong together."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
    _fit_json = field_validator("*")(fit_json)


M = TypeVar("M", bound=Message)


def parse(model: type[M], payload: Any) -> M:
    """Validate a decoded JSON body.

    Raises UserError that names each wrong field with the value found.
    """
    try:
        return model.model_validate(payload)
    except ValidationError as error:
        raise UserError(describe(error.errors(include_url=False))) from error


def describe(problems: Sequence[Any]) -> str:
    """Word pydantic's error details for a user: the first few of them."""
    more = len(problems) - MOST_PROBLEMS
    texts = [_describe(problem) for problem in problems[:MOST_PROBLEMS]]
    return "; ".join([*texts, f"and {more} more"] if more > 0 else texts)


def _describe(item: Any) -> str:
    field = ".".join(map(_part, item["loc"])) or "body"
    if item["type"] == "missing":
        return f"{field} is missing"
    if item["type"] == _UNKNOWN_KEY:
        return f"{field} {item['msg']}"
    if item["type"] == "extra_forbidden":
        return f"{field} is not supported"
    if item["type"] == "model_type":  # pydantic's words name the class
        return f"{field}: expected an object, found {shorten(item['input'])}"
    if item["type"] == "value_error":  # our own words
        return f"{field}: {item['msg'].removeprefix('Value error, ')}, found {shorten(item['input'])}"
    return f"{field}: {item['msg']}, found {shorten(item['input'])}"


def _part(part: str | int) -> str:
    """Return a part of a field's path, of which clients choose some."""
    plain = isinstance(part, int) or (len(part) <= _SHOWN and part.isprintable())
    return str(part) if plain else shorten(part)


def shorten(value: object) -> str:
    """Return the beginning of a value's repr; of a JSON value no more than that is made."""
    text = ""
    for part in _repr(value):
        text += part
        if len(text) > _SHOWN:
            return f"{text[: _SHOWN - 3]}..."
    return text


def _repr(value: object) -> Iterator[str]:
    """Yield the parts of a JSON value's repr, each of them short."""
    if isinstance(value, str):
        yield repr(value[: _SHOWN + 1])
    elif isinstance(value, dict):
        for sign, (key, item) in zip(_signs("{"), value.items(), strict=False):
            yield sign
            yield from _repr(key)
            yield ": "
            yield from _repr(item)
        yield "}" if value else "{}"
    elif isinstance(value, list):
        for sign, item in zip(_signs("["), value, strict=False):
            yield sign
            yield from _repr(item)
        yield "]" if value else "[]"
    else:
        yield repr(value)


def _signs(first: str) -> Iterator[str]:
    return chain((first,), repeat(", "))


def utc(epoch: float) -> datetime:
    """Convert stored epoch seconds to the wire's time, which always has a timezone."""
    return datetime.fromtimestamp(epoch, UTC)

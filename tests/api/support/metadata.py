"""Metadata of any kind, which each database must find by the text that is displayed of it."""

from typing import Any

from tests.api.support.world import Json, World

VALUES: list[Any] = [
    "a b",
    r"\u0000 as text",
    "1",
    True,
    None,
    3,
    1.0,
    -0.0,
    1e20,
    1e-7,
    5e-324,
    123456789.12345678,
    2**63 - 1,
    2**64 - 1,
    [1, "x"],
    {"a": {"é": [1e20, None]}, "": ""},
]
_KEYS = [f'{number} "key" [0].é' for number in range(len(VALUES))]
_NEAR: list[tuple[Any, str]] = [
    (3, "3.0"),
    (1.0, "1"),
    (-0.0, "0.0"),
    (-0.0, "0"),
    (1e20, "100000000000000000000"),
    (2**63 - 1, "9223372036854775808"),
    (2**64 - 1, "18446744073709551614"),
    (2**64 - 1, "18446744073709551616"),
    (2**64 - 1, "18446744073709552000.0"),
]
"""Values, and texts of other numbers that are equal to them, or as floats."""


def _key_of(value: Any) -> str:
    return next(key for key, each in zip(_KEYS, VALUES, strict=True) if repr(each) == repr(value))


async def check_search(world: World) -> None:
    opened: Json = {"sdk_version": "0.38.0", "user_metadata": dict(zip(_KEYS, VALUES, strict=True))}
    session = (await world.ok("create_session", opened))["session_id"]
    await world.session()
    shown = (await world.http.get(f"sessions/{session}")).json()["user_metadata"]
    for key, value in zip(_KEYS, VALUES, strict=True):
        found = await world.ok("sessions/search", {"user_metadata": {key: shown[key]}})
        assert [each["session_id"] for each in found["sessions"]] == [session], value
    others = ["True", "1.00", "2", '[1, "x"]', "NaN", "[", "x"]
    wrong = [*zip(_KEYS, others, strict=False), *((_key_of(value), text) for value, text in _NEAR)]
    for key, text in wrong:
        assert not (await world.ok("sessions/search", {"user_metadata": {key: text}}))["sessions"], text

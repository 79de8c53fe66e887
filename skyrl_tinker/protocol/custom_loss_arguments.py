"""Arguments of the calls in an uploaded loss: constants and refs to earlier nodes, in bounded number."""

from collections.abc import Mapping
from typing import Any

from skyrl_tinker.domain.custom_loss_ops import (
    ALIASES,
    ATTRIBUTES,
    DTYPES,
    MAX_INT,
    NEUTRAL,
    STRINGS,
    Signature,
)
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.schemas.base import shorten
from skyrl_tinker.protocol.schemas.losses import CustomLossNode

MAX_VALUES = 256
"""Most values of one call, nested ones counted."""
MAX_DEPTH = 6
FLOATS = ("inf", "-inf", "nan")
"""Values that JSON has no numbers for."""


def check_arguments(node: CustomLossNode, target: str, signature: Signature, known: set[str]) -> None:
    """Check a call's arguments. `known`: names of earlier nodes. Raises UserError that names the node."""
    where = f"node {node.name!r} ({target})"
    if len(node.args) > len(signature.parameters) and not signature.variadic:
        raise UserError(
            f"{where}: found {len(node.args)} arguments, expected at most {_listed(signature.parameters)}"
        )
    for key, value in node.keywords.items():
        _check_keyword(key, value, signature, where)
    checker = _Arguments(where, known)
    if target == "getattr":
        checker.check_attribute(node)
    else:
        checker.check([*node.args, *node.keywords.values()], MAX_DEPTH)


def _check_keyword(key: str, value: object, signature: Signature, where: str) -> None:
    if key in NEUTRAL and key not in signature.parameters:
        if not any(value is neutral or value == neutral for neutral in NEUTRAL[key]):
            raise UserError(f"{where}: {key} is {shorten(value)}, expected {NEUTRAL[key][0]}")
    elif ALIASES.get(key, key) not in signature.parameters:
        raise UserError(
            f"{where}: found the keyword {shorten(key)}, expected one of {_listed(signature.parameters)}"
        )


class _Arguments:
    """Check of all values of one call, which counts them."""

    def __init__(self, where: str, known: set[str]) -> None:
        self._where = where
        self._known = known
        self._left = MAX_VALUES

    def check_attribute(self, node: CustomLossNode) -> None:
        name = node.args[1] if len(node.args) == 2 else None
        if node.keywords or not isinstance(name, str) or name not in ATTRIBUTES:
            raise UserError(
                f"{self._where}: expected a value and the name of one of its attributes, "
                f"{_listed(sorted(ATTRIBUTES))}"
            )
        self.check(node.args[:1], MAX_DEPTH)

    def check(self, values: list[Any], depth: int) -> None:
        self._left -= len(values)
        if self._left < 0 or not depth:
            raise UserError(
                f"{self._where}: expected at most {MAX_VALUES} values, nested at most {MAX_DEPTH} deep"
            )
        for value in values:
            self._check_value(value, depth)

    def _check_value(self, value: Any, depth: int) -> None:
        match value:
            case None | bool() | float():
                pass
            case int():
                self._require(abs(value) <= MAX_INT, value, "an integer of 64 bits")
            case str():
                self._require(value in STRINGS, value, f"no text but {_listed(sorted(STRINGS))}")
            case list():
                self.check(value, depth - 1)
            case dict():
                self._check_object(value, depth)
            case _:
                self._require(False, value, "a JSON value")

    def _check_object(self, value: Mapping[str, Any], depth: int) -> None:
        self._require(len(value) == 1, value, "an object of one key")
        match value:
            case {"ref": str(name)}:
                self._require(name in self._known, name, "a ref to an earlier node")
            case {"tuple": list(items)}:
                self.check(items, depth - 1)
            case {"slice": [_, _, _] as parts}:
                self.check(parts, depth - 1)
            case {"ellipsis": True}:
                pass
            case {"float": text}:
                self._require(text in FLOATS, text, _listed(FLOATS))
            case {"dtype": str(name)}:
                self._require(name in DTYPES, name, _listed(sorted(DTYPES)))
            case {"device": name}:
                self._require(name == "cpu", name, "cpu: the server chooses the device")
            case _:
                self._require(False, value, "ref, tuple, slice, ellipsis, float, dtype or device")

    def _require(self, condition: bool, value: object, expected: str) -> None:
        if not condition:
            raise UserError(f"{self._where}: found the argument {shorten(value)}, expected {expected}")


def _listed(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names)

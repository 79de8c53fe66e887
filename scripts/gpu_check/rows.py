"""Rows of the table: a name, a value, its bound, and if it holds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

HELD, BROKEN, SKIPPED = "yes", "NO", "-"


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    value: float | str
    bound: str
    ok: str  # HELD, BROKEN or SKIPPED
    figures: Mapping[str, float] = field(default_factory=dict)  # of which the value is the text

    def line(self) -> str:
        value = f"{self.value:.4g}" if isinstance(self.value, float) else str(self.value)
        return f"{self.name:<88} | {value:<24} | {self.bound:<16} | {self.ok}"


HEADER = Row("name", "value", "bound", "ok").line()


def require(name: str, holds: bool, value: float | str, bound: str) -> Row:
    return Row(name, value, bound, HELD if holds else BROKEN)


def at_most(name: str, value: float, bound: float) -> Row:
    """Require a value of at most `bound`; nan is not."""
    return require(name, value <= bound, _number(value), f"<= {bound:g}")


def at_least(name: str, value: float, bound: float) -> Row:
    return require(name, value >= bound, _number(value), f">= {bound:g}")


def _number(value: float) -> float | str:
    """Return what JSON can hold."""
    return value if math.isfinite(value) else str(value)


def same(name: str, equal: bool) -> Row:
    """Require equality to the last bit."""
    return require(name, equal, "equal" if equal else "different", "equal bits")


def measured(name: str, value: float | str) -> Row:
    """Report a value without a bound; a number must be finite."""
    if isinstance(value, str):
        return require(name, True, value, "")
    return require(name, math.isfinite(value), _number(value), "")


def measured_together(name: str, figures: Mapping[str, float]) -> Row:
    """Report several numbers, with their units as keys."""
    text = ", ".join(f"{value:.4g} {unit}" for unit, value in figures.items())
    if all(map(math.isfinite, figures.values())):
        return Row(name, text, "", HELD, figures)
    return Row(name, text, "finite", BROKEN)


def skipped(name: str, reason: str) -> Row:
    return Row(name, reason, "not checked", SKIPPED)


def failed(name: str, error: BaseException | str) -> Row:
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return Row(name, text.strip().partition("\n")[0], "no error", BROKEN)

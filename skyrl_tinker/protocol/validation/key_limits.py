"""Limits of one API key. A server without keys has one user, to whom its settings apply."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, ValidationError

from skyrl_tinker.domain.ids import SessionId
from skyrl_tinker.domain.units import GB, KiB
from skyrl_tinker.errors import KeyLimitError, UserError
from skyrl_tinker.protocol.schemas.base import Table, describe

_OF_ONE: Mapping[str, Any] = {"metadata_kb": 256, "stop_kb": 64}
_OF_SEVERAL: Mapping[str, Any] = {"sessions": 1000, "backlog": 10_000, "metadata_kb": 16, "stop_kb": 64}
_WORDS = {"none": None, "default": "default"}


class KeyLimits(Table):
    """Limits of each API key, which `skyrl-tinker keys limit` changes for one of them."""

    models: int | None = Field(None, ge=0)
    """Models in training [default: any number]"""
    resident_gb: float | None = Field(None, ge=0)
    """State (weights, gradients, moments) of the models in training [default: any amount]"""
    stored_gb: float | None = Field(None, ge=0)
    """Checkpoints; beyond it saves fail [default: any amount]"""
    sessions: int | None = Field(None, ge=0)
    """Open sessions [default: any number, with several keys 1000]"""
    backlog: int | None = Field(None, ge=1)
    """Waiting requests; beyond it new ones are answered with 429 and the SDK tries again [default: any
    number, with several keys 10000]
    """
    requests_per_s: float | None = Field(None, gt=0)
    """Requests per second, on average over ten seconds, without those that wait for results; beyond it 429
    [default: any number]
    """
    metadata_kb: float | None = Field(None, ge=0)
    """Metadata, tags and names in one request, as JSON [default: 256, with several keys 16]"""
    stop_kb: float | None = Field(None, ge=0)
    """Stop strings of one sample [default: 64]"""

    def filled(self, *, several: bool) -> "KeyLimits":
        """Return these, and where there is none the default; `several`: keys, which share the server."""
        defaults = _OF_SEVERAL if several else _OF_ONE
        unset = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return self.model_copy(update=unset)

    def overridden(self, by: Mapping[str, Any]) -> "KeyLimits":
        return self.model_copy(update={name: value for name, value in by.items() if name in NAMES})

    def require_models(self, sessions: Sequence[SessionId]) -> None:
        """Refuse one model more than those of `sessions`, the quietest first.

        Raises KeyLimitError, like all that follow.
        """
        if self.models is not None and len(sessions) >= self.models:
            remedy = f"unload one of them or {_end(sessions)}"
            raise _refused("models", len(sessions), self.models, "models in training", remedy)

    def require_sessions(self, sessions: Sequence[SessionId]) -> None:
        """Refuse one session more than `sessions`, the quietest first."""
        if self.sessions is not None and len(sessions) >= self.sessions:
            raise _refused("sessions", len(sessions), self.sessions, "open sessions", _end(sessions))

    def require_resident(self, held_bytes: float, more_bytes: float) -> None:
        """Check the state of all models together with one more."""
        total = (held_bytes + more_bytes) / GB
        if self.resident_gb is not None and total > self.resident_gb:
            raise _refused(
                "resident_gb", total, self.resident_gb, "GB of model state with this model", "unload a model"
            )

    def require_stored(self, held_bytes: float, more_bytes: float = 0) -> None:
        """Check the checkpoints together with one more; of unknown size: that there is any room."""
        held = (held_bytes + more_bytes) / GB
        if self.stored_gb is not None and (
            held > self.stored_gb or (not more_bytes and held == self.stored_gb)
        ):
            raise _refused("stored_gb", held, self.stored_gb, "GB of checkpoints", "delete some of them")

    def require_metadata(self, size_bytes: int) -> None:
        """Check the size of the metadata, tags and names of one request, as JSON."""
        if self.metadata_kb is not None and size_bytes > self.metadata_kb * KiB:
            raise _refused("metadata_kb", size_bytes / KiB, self.metadata_kb, "KB of metadata", "send less")

    def require_stop(self, size_bytes: int) -> None:
        """Check the size of the stop strings of one request, in UTF-8."""
        if self.stop_kb is not None and size_bytes > self.stop_kb * KiB:
            raise _refused("stop_kb", size_bytes / KiB, self.stop_kb, "KB of stop strings", "send fewer")


UNLIMITED = KeyLimits()
NAMES = tuple(KeyLimits.model_fields)


def changes_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes of a key's limits, by name: "none" is None, "default" that of all keys.

    Raises UserError that names a wrong limit.
    """
    if unknown := sorted(given.keys() - set(NAMES)):
        raise UserError(f"limits: found {unknown[0]!r}, expected any of {', '.join(NAMES)}")
    numbers = {name: value for name, value in given.items() if value not in _WORDS}
    try:
        read = KeyLimits.model_validate(numbers)
    except ValidationError as error:
        told = describe(error.errors(include_url=False))
        raise UserError(f"{told}, expected a number, none or default") from error
    return {name: _WORDS[value] if value in _WORDS else getattr(read, name) for name, value in given.items()}


def _end(sessions: Sequence[SessionId]) -> str:
    """Return a remedy; with a limit of 0 there may be no session to name."""
    if not sessions:
        return "end a session"
    return f"end a session, as the one silent for longest (`skyrl-tinker end {sessions[0]}`)"


def _refused(name: str, found: float, limit: float, what: str, remedy: str) -> KeyLimitError:
    return KeyLimitError(
        f"keys.{name}: found {found:.6g} {what}, expected at most {limit:.6g} for one API key: {remedy}, "
        "or ask the operator for more"
    )

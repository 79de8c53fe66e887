"""Limits of one API key. A server without keys has one user, to whom its settings apply."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from skyrl_tinker.domain.ids import SessionId
from skyrl_tinker.domain.units import GB, KiB
from skyrl_tinker.errors import KeyLimitError

_OF_ONE: Mapping[str, Any] = {"metadata_kb": 256}
_OF_SEVERAL: Mapping[str, Any] = {"sessions": 1000, "backlog": 10_000, "metadata_kb": 16}


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits; None: none. Each is the setting `key_<name>`, which `keys limit` overrides for one key."""

    models: int | None = None
    resident_gb: float | None = None
    stored_gb: float | None = None
    sessions: int | None = None
    backlog: int | None = None
    requests_per_s: float | None = None
    metadata_kb: float | None = None
    stop_kb: float | None = None

    def filled(self, *, several: bool) -> "KeyLimits":
        """Return these, and where there is none the default; `several`: keys, which share the server."""
        defaults = _OF_SEVERAL if several else _OF_ONE
        unset = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return replace(self, **unset)

    def overridden(self, by: Mapping[str, Any]) -> "KeyLimits":
        return replace(self, **{name: value for name, value in by.items() if name in NAMES})

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
NAMES = tuple(field.name for field in fields(KeyLimits))


def _end(sessions: Sequence[SessionId]) -> str:
    """Return a remedy; with a limit of 0 there may be no session to name."""
    if not sessions:
        return "end a session"
    return f"end a session, as the one silent for longest (`skyrl-tinker end {sessions[0]}`)"


def _refused(name: str, found: float, limit: float, what: str, remedy: str) -> KeyLimitError:
    return KeyLimitError(
        f"key_{name}: found {found:.6g} {what}, expected at most {limit:.6g} for one API key: {remedy}, "
        "or ask the operator for more"
    )

"""Base models on demand, as an administrator starts and stops them."""

from skyrl_tinker.config import Settings
from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.errors import UserError


def on_demand(settings: Settings, bases: Bases, name: str) -> str:
    """Return the canonical name of a base model on demand. Raises UserError for others, with what to do."""
    facts = bases.require(name)
    if settings.idle_s_of(facts.name) is not None:
        return facts.name
    others = [each.name for each in bases.all if settings.idle_s_of(each.name) is not None]
    only = ", ".join(others) or "there is none"
    if facts == bases.first:
        raise UserError(
            f"base_model: found {name!r}, which always runs as the first one, expected one on demand: {only}"
        )
    raise UserError(
        f"base_model: found {name!r}, which always runs, expected one on demand: {only}; set start = "
        f'"on_demand" in its table of bases, and start the server again'
    )

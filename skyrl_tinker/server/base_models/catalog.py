"""All base models of a server: the first, which is trained, and further ones, which may be."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from skyrl_tinker.config import Settings
from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.errors import StartupError
from skyrl_tinker.server.base_models import base_model


def resolve_all(settings: Settings) -> Bases:
    """Find (or make) all base models, and read their facts. Raises StartupError that names the base model."""
    trained = [own.trains for own in settings.bases.values()]
    bases = Bases((base_model.resolve(settings), *map(_resolve, further(settings), trained)))
    known: dict[str, str] = {}
    for facts in bases.all:
        if (other := known.setdefault(facts.directory, facts.name)) != facts.name:
            raise StartupError(f"bases: {facts.name!r} is the directory of {other!r} once more")
    return bases


def further(settings: Settings) -> list[Settings]:
    """Return the settings of each further base model."""
    return [settings.for_base(name) for name in settings.bases]


@contextmanager
def refusals(settings: Settings) -> Iterator[None]:
    """Have a StartupError name the further base model whose settings these are, and its option."""
    try:
        yield
    except StartupError as error:
        name = settings.base_model
        told = str(error).replace(f"--base-model {name}", f"--also {name}")
        raise StartupError(f"bases.{name}: {told}") from error


def _resolve(settings: Settings, trainable: bool) -> BaseModelFacts:
    with refusals(settings):
        return replace(base_model.resolve(settings), trainable=trainable)

"""Base models of one server, found by any of their names."""

from dataclasses import dataclass

from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.errors import UserError


@dataclass(frozen=True, slots=True)
class Bases:
    """Base models that are served, at least one. As text: their canonical names."""

    all: tuple[BaseModelFacts, ...]

    @property
    def first(self) -> BaseModelFacts:
        return self.all[0]

    def find(self, name: str) -> BaseModelFacts | None:
        return next((facts for facts in self.all if name in facts.names), None)

    @property
    def sampled(self) -> str:
        """Names of those that are sampled."""
        return ", ".join(facts.name for facts in self.all if facts.sampleable) or "there is none"

    def require(self, name: str) -> BaseModelFacts:
        """Return the base model of a name. Raises UserError that lists those served."""
        return self._require(name, f"is served: {self}")

    def require_trainable(self, name: str) -> BaseModelFacts:
        """Return the base model of a name. Raises UserError, which lists those that train, for another."""
        expected = f"trains: {', '.join(facts.name for facts in self.all if facts.trainable)}"
        facts = self._require(name, expected)
        if not facts.trainable:
            raise UserError(
                f"base_model {name!r} is served for sampling only (roles of base {facts.name}), expected one "
                f"that {expected}; a server with --also {facts.given}:train,sample trains it, too"
            )
        return facts

    def require_sampled(self, name: str) -> BaseModelFacts:
        """Return the base model of a name. Raises UserError, which lists those sampled, for another."""
        return self.require_sampleable(self._require(name, f"is sampled: {self.sampled}"))

    def require_sampleable(self, facts: BaseModelFacts) -> BaseModelFacts:
        """Return the base model. UserError for one only trained."""
        if not facts.sampleable:
            where = "replicas = 0" if facts == self.first else f"roles of base {facts.name}"
            raise UserError(
                f"base_model {facts.name!r} is served for training only ({where}), expected one that is "
                f"sampled: {self.sampled}; weights saved under a name can be sampled after a start of the "
                "server with samplers"
            )
        return facts

    def _require(self, name: str, expected: str) -> BaseModelFacts:
        facts = self.find(name)
        if facts is None:
            raise UserError(f"base_model is {name!r}, expected one that {expected}")
        return facts

    def __str__(self) -> str:
        return ", ".join(facts.name for facts in self.all)

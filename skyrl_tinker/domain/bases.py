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

    def require(self, name: str) -> BaseModelFacts:
        """Return the base model of a name. Raises UserError that lists those served."""
        facts = self.find(name)
        if facts is None:
            raise UserError(f"base_model is {name!r}, expected one that is served: {self}")
        return facts

    def require_trainable(self, name: str) -> BaseModelFacts:
        """Return the base model of a name, as `require` does. UserError for one only sampled."""
        facts = self.require(name)
        if not facts.trainable:
            trained = Bases(tuple(each for each in self.all if each.trainable))
            raise UserError(
                f"base_model {name!r} is served for sampling only (roles of base {facts.name}), expected one "
                f"that trains: {trained}; a server with --also {facts.given}:train,sample trains it, too"
            )
        return facts

    def require_sampleable(self, facts: BaseModelFacts) -> BaseModelFacts:
        """Return the base model. UserError for one only trained."""
        if not facts.sampleable:
            where = "replicas = 0" if facts == self.first else f"roles of base {facts.name}"
            sampled = [each.name for each in self.all if each.sampleable]
            raise UserError(
                f"base_model {facts.name!r} is served for training only ({where}), expected one that is "
                f"sampled: {', '.join(sampled) or 'there is none'}; weights saved under a name can be "
                "sampled after a start of the server with samplers"
            )
        return facts

    def __str__(self) -> str:
        return ", ".join(facts.name for facts in self.all)

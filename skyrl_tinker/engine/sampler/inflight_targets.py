"""Inflight sampling (`kind: inflight`): weights that are replaced while a model's clients sample."""

from dataclasses import dataclass

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import WeightVersion


@dataclass(eq=False)
class InflightTarget:
    """Weights that all inflight sampling clients of one model share. `version` only becomes newer."""

    model: ModelKey
    version: WeightVersion

    @property
    def tag(self) -> str:
        """The inference client's name for its running requests."""
        return f"m{self.model}"


SampleSource = WeightVersion | InflightTarget | None
"""Weights that a sampling client samples from; None: the base model."""


def newest(source: WeightVersion | InflightTarget) -> WeightVersion:
    """Return the source's version at this moment."""
    return source.version if isinstance(source, InflightTarget) else source


class InflightTargets:
    """One target per model, until its last version is dropped."""

    def __init__(self) -> None:
        self._targets: dict[ModelKey, InflightTarget] = {}

    def at_least(self, model: ModelKey, version: WeightVersion) -> InflightTarget:
        """Return the model's target at `version` or a newer one: publications may be reordered."""
        target = self._targets.setdefault(model, InflightTarget(model, version))
        if target.version.id < version.id:
            target.version = version
        return target

    def forget(self, version: WeightVersion) -> None:
        """Remove the target if it is still at this version, which no client samples any more."""
        for target in [target for target in self._targets.values() if target.version == version]:
            del self._targets[target.model]

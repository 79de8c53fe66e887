"""Weights that clients sample; those of inflight clients (`kind: inflight`) are replaced meanwhile."""

from dataclasses import dataclass

from skyrl_tinker.domain.ids import ModelKey, SamplingSessionId
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


class KnownSources:
    """Sources of the last `most` sampling sessions looked up, each until its version is dropped."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._sources: dict[SamplingSessionId, SampleSource] = {}
        self._sessions: dict[SampleSource, set[SamplingSessionId]] = {}
        self._targets: set[InflightTarget] = set()  # among the sources

    def __contains__(self, session: SamplingSessionId) -> bool:
        return session in self._sources

    def __getitem__(self, session: SamplingSessionId) -> SampleSource:
        return self._sources[session]

    def add(self, session: SamplingSessionId, source: SampleSource) -> None:
        """Add the source of a session that is not known."""
        if len(self._sources) >= self._most:
            self._remove(next(iter(self._sources)))
        self._sources[session] = source
        self._sessions.setdefault(source, set()).add(session)
        if isinstance(source, InflightTarget):
            self._targets.add(source)

    def forget(self, version: WeightVersion) -> None:
        """Remove the sources at this version."""
        over: list[SampleSource] = [target for target in self._targets if target.version == version]
        for source in (*over, version):
            for session in tuple(self._sessions.get(source, ())):
                self._remove(session)

    def _remove(self, session: SamplingSessionId) -> None:
        source = self._sources.pop(session)
        others = self._sessions[source]
        others.remove(session)
        if others:
            return
        del self._sessions[source]
        if isinstance(source, InflightTarget):
            self._targets.remove(source)

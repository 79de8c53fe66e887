"""Stand-in for Samplers, which draws each sample from nothing but its prompt.

tests/inference/test_sampler_promises.py has what it shares with the real ones.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from skyrl_tinker.domain.ids import ModelKey, VersionId
from skyrl_tinker.domain.samples import SampledSequence, SampleOutput, SampleRequest, VersionSpan
from skyrl_tinker.domain.values import BaseModelFacts, WeightVersion
from skyrl_tinker.engine.sampler.inflight_targets import InflightTarget, InflightTargets, SampleSource, newest
from skyrl_tinker.engine.scheduling.priorities import Share
from skyrl_tinker.engine.scheduling.sample_gate import SampleGate
from skyrl_tinker.inference.constants import BASE_MODEL
from skyrl_tinker.protocol.queue_views import ReplicaView, SamplingView
from tests.support.scripted_trainer import CapturedSteps


class ScriptedSamplers:
    """Samplers that note what is asked of them, and do what their fields say.

    `drawn`: prompts of all samples, in order, `sources` what they were drawn from, `stopped` the prompts of
    those that were cancelled. Samples wait for `go_on`, then end in `failure`, or in `sequences`, by default
    their prompts. `serves`: name of the version that they claim, by default that of their source.
    `taken`: for each announced version, whether it came from the ranks, and whether there were files; all
    announcements wait for `going_on`.
    """

    cores = 1

    def __init__(self, names: Sequence[str] = ("tiny",)) -> None:
        """`names`: of the base model."""
        self.facts = BaseModelFacts(
            "/nowhere", (*names,), "Qwen3ForCausalLM", 512, 128, 2, 1, 64, 64, True, (0,)
        )
        self.gate = SampleGate()
        self.drawn: list[tuple[int, ...]] = []
        self.sources: list[SampleSource] = []
        self.stopped: list[tuple[int, ...]] = []
        self.failure: Exception | None = None
        self.sequences: tuple[SampledSequence, ...] | None = None
        self.serves: str | None = None
        self.prompt_logprob = -1.5
        self.paused: str | None = None
        self.replicas: tuple[ReplicaView, ...] = ()
        self.swaps = self.transport = self
        self.takes_captured = False
        self.lent: dict[VersionId, CapturedSteps] = {}
        self.taken: list[str] = []
        self.go_on, self.going_on = asyncio.Event(), asyncio.Event()
        self.go_on.set()
        self.going_on.set()
        self._targets = InflightTargets()

    async def sample(self, source: SampleSource, request: SampleRequest, share: Share = None) -> SampleOutput:
        self.drawn.append(request.prompt)
        self.sources.append(source)
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.stopped.append(request.prompt)
            raise
        if self.failure is not None:
            raise self.failure
        name = self.serves or (BASE_MODEL if source is None else newest(source).name)
        sequences = tuple(_served(each, request, name) for each in self._drawn(request))
        return SampleOutput(sequences, self._scores(request))

    def _drawn(self, request: SampleRequest) -> tuple[SampledSequence, ...]:
        if self.sequences is not None:
            return self.sequences
        most = request.params.max_tokens
        tokens = request.prompt if most is None else request.prompt[:most]
        reason: Literal["stop", "length"] = "length" if len(tokens) == most else "stop"
        return (SampledSequence(tokens, (-0.5,) * len(tokens), reason),) * request.num_samples

    def _scores(self, request: SampleRequest) -> tuple[float, ...] | None:
        rest = (self.prompt_logprob,) * (len(request.prompt) - 1)
        return (float("nan"), *rest) if request.prompt_logprobs else None

    def target(self, model: ModelKey, version: WeightVersion) -> InflightTarget:
        return self._targets.at_least(model, version)

    async def fetch(self, source: SampleSource, share: Share) -> None:
        """Return at once: all files are here."""

    async def load(self, version: WeightVersion) -> None:
        """Return at once: all comes on demand."""

    async def announce(self, source: WeightVersion | InflightTarget) -> None:
        captured = self.lent.get(newest(source).id)
        place = "ranks" if captured is not None and captured in captured.kept else "files"
        files = "with" if Path(newest(source).directory).exists() else "without"  # noqa: ASYNC240
        self.taken.append(f"{place}, {files} files")
        await self.going_on.wait()

    def lend(self, version: WeightVersion, captured: CapturedSteps) -> None:
        self.lent[version.id] = captured

    async def end_loan(self, version: WeightVersion) -> None:
        self.lent.pop(version.id, None)

    async def unload(self, version: WeightVersion) -> None:
        self._targets.forget(version)

    def view(self, waiting: SamplingView) -> SamplingView:
        return replace(waiting, paused=self.paused, replicas=self.replicas)

    def in_use(self, version: WeightVersion) -> bool:
        return False

    def idle_s(self, version: WeightVersion) -> float:
        return 0.0


def _served(sequence: SampledSequence, request: SampleRequest, name: str) -> SampledSequence:
    experts = sequence.routed_experts if request.routed_experts else None
    versions = (VersionSpan(name, 0, len(sequence.tokens)),)
    return replace(sequence, routed_experts=experts, versions=versions)

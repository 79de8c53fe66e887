"""One sample as requests to samplers: split, sent under leases, resumed after aborts, joined."""

import asyncio
from dataclasses import dataclass, field, replace

from skyrl_tinker.domain.samples import SampleOutput, SampleRequest
from skyrl_tinker.engine.sampler.inflight_targets import SampleSource
from skyrl_tinker.engine.sampler.lease import Leases
from skyrl_tinker.engine.scheduling.priorities import Priorities, Share
from skyrl_tinker.inference.client.data_plane import DataPlane
from skyrl_tinker.inference.client.generated import GeneratedSequence, SamplerResponse, join, resumable
from skyrl_tinker.inference.client.sample_parts import max_tokens, remainder, scores_prompt, split
from skyrl_tinker.inference.constants import MAX_SEQUENCES

ABORT_PAUSE_S = 0.05
"""Seconds between tries of a sequence that is aborted repeatedly while samplers are paused."""


@dataclass(frozen=True, slots=True)
class SampleCall:
    """One try of a sample; `session_key`, `eos`, `context` and `tag` are those of DataPlane.sample."""

    data: DataPlane
    leases: Leases
    source: SampleSource
    session_key: str
    eos: tuple[int, ...]
    context: int
    tag: str | None = None
    share: Share = None
    priorities: Priorities = field(default_factory=Priorities)
    replicas: set[str] = field(default_factory=set)
    """Addresses of the replicas that have answered so far."""

    async def execute(self, request: SampleRequest) -> SampleOutput:
        """Sample, at most MAX_SEQUENCES concurrently. Raises errors of DataPlane.sample and of the lease."""
        parts = split(request, context=self.context, most=self.data.most_sequences)
        if len(parts) == 1:
            return join(request, [await self._in_order(parts[0])], self.replicas)
        at_once = asyncio.Semaphore(MAX_SEQUENCES // max(part.num_samples for part in parts))

        async def complete(part: SampleRequest) -> SamplerResponse:
            async with at_once:
                return await self._in_order(part)

        tasks = [asyncio.create_task(complete(part)) for part in parts]
        try:
            return join(request, await asyncio.gather(*tasks), self.replicas)
        finally:  # one part's error ends the others before all are tried again
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _in_order(self, part: SampleRequest) -> SamplerResponse:
        tokens = len(part.prompt) + part.num_samples * max_tokens(part, self.context)
        with self.priorities.take(self.share, tokens) as priority:
            return await self._complete(part, priority)

    async def _complete(self, request: SampleRequest, priority: int) -> SamplerResponse:
        """Send the request and resume its aborted sequences until each has ended."""
        response = await self._send(request, priority)
        if all(sequence.finish != "abort" for sequence in response.sequences):
            return response
        sequences = await asyncio.gather(
            *(
                self._resume(request, priority, index, sequence, response.switched)
                for index, sequence in enumerate(response.sequences)
            )
        )
        return replace(response, sequences=tuple(sequences))

    async def _send(
        self, request: SampleRequest, priority: int, *, interruptible: bool = True
    ) -> SamplerResponse:
        """Make one request; repeat all of it while it is aborted before its prompt is scored.

        A request that would have to start over is not interruptible for others: it might never end.
        """
        interruptible &= request.params.seed is None and not scores_prompt(request)
        while True:
            async with self.leases.open(self.source) as model:
                response = await self.data.sample(
                    model,
                    request,
                    self.session_key,
                    self.eos,
                    self.context,
                    self.tag,
                    interruptible=interruptible,
                    priority=priority,
                    fields=self.leases.cache_fields(),
                )
            if response.replica is not None:
                self.replicas.add(response.replica)
            if response.scored:
                return response
            await asyncio.sleep(ABORT_PAUSE_S)

    async def _resume(
        self, request: SampleRequest, priority: int, index: int, sequence: GeneratedSequence, switched: bool
    ) -> GeneratedSequence:
        known = 0
        while sequence.finish == "abort":
            await asyncio.sleep(ABORT_PAUSE_S)
            kept = await resumable(request, sequence, switched=switched, text_of=self.data.detokenize)
            rest = remainder(request, index, kept.tokens, context=self.context)
            if rest is None:  # it was aborted after its last token
                return replace(kept, finish="length")
            response = await self._send(rest, priority, interruptible=len(kept.tokens) > known)
            known = len(kept.tokens)
            sequence, switched = kept.then(response.sequences[0]), response.switched
        return sequence

"""Sequences as a sampler returned them: resumed where they were aborted, joined to Tinker's output. Pure."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from skyrl_tinker.domain.samples import (
    AltTokens,
    SampledSequence,
    SampleOutput,
    SampleRequest,
    TargetLogprobs,
    TopkRow,
    VersionSpan,
)
from skyrl_tinker.domain.values import RoutedExperts
from skyrl_tinker.errors import SamplerError, UserError
from skyrl_tinker.inference.client.sample_parts import stop_strings
from skyrl_tinker.inference.constants import BASE_MODEL, START_VERSION

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Text of the first bytes of a character whose other bytes are missing."""
LONGEST_INCOMPLETE = 3  # bytes, and so tokens at most
BYTES = LONGEST_INCOMPLETE + 1
CONTEXT_TOKENS = 8
"""Preceding tokens that are detokenized along: some tokenizers write a first token differently."""
TextOf = Callable[[tuple[int, ...]], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class GeneratedSequence:
    """One sequence as a sampler returned it; `abort`: it was interrupted and has to be resumed."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length", "abort"]
    topk: tuple[TopkRow, ...] = ()  # [len(tokens)] when asked for
    versions: tuple[VersionSpan, ...] = ()
    experts: RoutedExperts | None = None  # of the prompt and of all tokens but the last, when asked for

    def first(self, count: int) -> "GeneratedSequence":
        """Return the first `count` tokens as an aborted sequence."""
        return GeneratedSequence(
            self.tokens[:count],
            self.logprobs[:count],
            "abort",
            self.topk[:count],
            tuple(replace(span, end=min(span.end, count)) for span in self.versions if span.start < count),
            None if self.experts is None or not count else self.experts[: count - len(self.tokens) or None],
        )

    def then(self, rest: "GeneratedSequence") -> "GeneratedSequence":
        return GeneratedSequence(
            self.tokens + rest.tokens,
            self.logprobs + rest.logprobs,
            rest.finish,
            self.topk + rest.topk,
            _joined(self.versions, rest.versions, len(self.tokens)),
            _resumed(self.experts, rest.experts),
        )


def _joined(
    head: tuple[VersionSpan, ...], tail: tuple[VersionSpan, ...], offset: int
) -> tuple[VersionSpan, ...]:
    moved = tuple(replace(span, start=span.start + offset, end=span.end + offset) for span in tail)
    if head and moved and head[-1].version == moved[0].version:
        return (*head[:-1], replace(head[-1], end=moved[0].end), *moved[1:])
    return head + moved


def _resumed(kept: RoutedExperts | None, resumed: RoutedExperts | None) -> RoutedExperts | None:
    """Return the experts of the kept tokens as first sampled, followed by those of the rest."""
    if kept is None or resumed is None:
        return resumed if kept is None else kept
    return np.concatenate([kept, resumed[len(kept) :]])


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Other scores; `targets` in the order of TargetTokens.tokens, 0.0 where nothing was requested."""

    targets: tuple[float, ...] = ()
    draws: AltTokens | None = None


@dataclass(frozen=True, slots=True)
class SamplerResponse:
    """One response of a sampler. `scored`: the prompt's scores are there, or none were requested.

    `switched`: the request's tag was aborted, so aborted sequences go on under other weights. `replica`: the
    address of the server that answered; None for a server that we did not start.
    """

    sequences: tuple[GeneratedSequence, ...]
    cached_tokens: int
    scored: bool
    switched: bool = False
    replica: str | None = None
    prompt_logprobs: tuple[float, ...] | None = None
    topk_prompt_logprobs: tuple[TopkRow, ...] | None = None
    scores: PromptScores | None = None


def most_likely(candidates: Iterable[tuple[int, float]], k: int) -> TopkRow:
    """Return the k most likely (token, logprob), best first; ties by the lower token."""
    return tuple(sorted(candidates, key=lambda candidate: (-candidate[1], candidate[0]))[:k])


def version_spans(answer: Mapping[str, Any], model: str | None, count: int) -> tuple[VersionSpan, ...]:
    """Return spans of tokens by weight version: the adapter's name; for full weights, as the sampler says."""
    if count == 0:
        return ()
    if model is not None and model != BASE_MODEL:
        return (VersionSpan(model, 0, count),)
    spans = (
        (str(span["version"]), span["start"], span["end"]) for span in answer.get("weight_versions") or ()
    )
    named = {START_VERSION: BASE_MODEL}
    return tuple(VersionSpan(named.get(name, name), start, end) for name, start, end in spans if end > start)


def diverged() -> UserError:
    return UserError(
        "the weights give logprobs that are not finite numbers: their training has diverged; "
        "go back to an earlier checkpoint"
    )


def refused(status: int, message: str) -> UserError | SamplerError:
    """Return the error for a status that has the same meaning in all engines."""
    if status in (400, 422):
        return UserError(message)
    return SamplerError(f"the sampler answered {status}: {message}")


# Resuming


async def resumable(
    request: SampleRequest, aborted: GeneratedSequence, *, switched: bool, text_of: TextOf
) -> GeneratedSequence:
    """Return the part of an aborted sequence that is kept, with its logprobs; sampling continues after it.

    * A seeded sequence cannot resume its random numbers in the middle. If only a pause aborted it, it starts
      over and ends as if never interrupted. If its policy was switched (SamplerControl.abort), there is
      nothing to reproduce, and starting over at each switch it might never end: it continues, with a seed
      made of its own seed and the number of its tokens.
    * Stop strings are looked for in the text of one request only. So the tokens kept are the longest prefix
      whose text does not end in the beginning of a stop string; the tokens after it are sampled again.
    """
    if request.params.seed is not None and not switched:
        return aborted.first(0)
    stops = stop_strings(request.params.stop)
    if not stops:
        return aborted
    before = request.prompt[-CONTEXT_TOKENS:]
    most = max(map(len, stops))
    count = len(aborted.tokens)
    while count and _ends_in_stop(await _ending(before, aborted.tokens[:count], most, text_of), stops):
        count -= 1
    return aborted.first(count)


async def _ending(before: tuple[int, ...], tokens: tuple[int, ...], most: int, text_of: TextOf) -> str:
    """Return the text of `tokens`, which follow `before`; at least its last `most` characters."""
    characters = most + CONTEXT_TOKENS  # the text may differ at the cut
    count = BYTES * characters
    while True:
        behind = min(count, len(tokens))
        tail = (before + tokens)[-(CONTEXT_TOKENS + behind) :]
        text = (await text_of(tail))[len(await text_of(tail[:-behind])) :]
        if len(text) >= characters or behind == len(tokens):
            return text
        count *= BYTES  # some tokens have no text


def _ends_in_stop(generated: str, stops: tuple[str, ...]) -> bool:
    """Return whether a stop string may have begun at the end of the text."""
    ending = len(generated) - len(generated.rstrip(REPLACEMENT))
    if 0 < ending <= LONGEST_INCOMPLETE and not all(stop.isascii() for stop in stops):
        return True
    return any(generated.endswith(stop[:length]) for stop in stops for length in range(1, len(stop)))


def join(
    request: SampleRequest, responses: Sequence[SamplerResponse], replicas: Iterable[str]
) -> SampleOutput:
    """Join the responses to the parts of `request`; the first has the prompt's scores."""
    first, sequences = responses[0], [sequence for part in responses for sequence in part.sequences]
    copies = request.num_samples // request.sequences
    targets, scores = request.target_prompt_logprobs, first.scores or PromptScores()
    draws = scores.draws
    if draws is None and request.prompt_alt_tokens_k:
        draws = AltTokens(request.prompt_alt_tokens_k, (), ())  # a prompt of one token has no position
    return SampleOutput(
        tuple(_sampled(sequence) for sequence in sequences) * copies,
        first.prompt_logprobs,
        first.cached_tokens,
        first.topk_prompt_logprobs,
        TargetLogprobs(targets, scores.targets) if targets is not None else None,
        draws,
        tuple(sorted(replicas)),
    )


def _sampled(sequence: GeneratedSequence) -> SampledSequence:
    if sequence.finish == "abort":
        raise AssertionError("aborted sequences are completed before they are handed out")
    return SampledSequence(
        sequence.tokens,
        sequence.logprobs,
        sequence.finish,
        sequence.topk,
        sequence.versions,
        sequence.experts,
    )

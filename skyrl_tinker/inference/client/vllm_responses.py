"""vLLM's answer as Tinker's. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from skyrl_tinker.domain.values import (
    AltTokens,
    SampledSequence,
    SampleOutput,
    SampleRequest,
    TargetLogprobs,
    TopkRow,
    VersionSpan,
)
from skyrl_tinker.errors import SamplerError, UserError
from skyrl_tinker.inference.client import prompt_scores
from skyrl_tinker.inference.client.prompt_scores import PromptScores
from skyrl_tinker.inference.constants import BASE_MODEL

VLLM_START_VERSION = "default"
"""How vLLM calls the weights with which it started: those of the base model."""

VLLM_LEAST_LOGPROB = -9999.0
"""What vLLM writes in place of what is less, or no number."""


@dataclass(frozen=True, slots=True)
class GeneratedSequence:
    """One sequence as vLLM left it; `abort` means that it was cut short and has to go on."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length", "abort"]
    topk: tuple[TopkRow, ...] = ()  # [len(tokens)] when asked for
    versions: tuple[VersionSpan, ...] = ()

    def first(self, count: int) -> "GeneratedSequence":
        """Its first tokens only, still aborted."""
        return GeneratedSequence(
            self.tokens[:count],
            self.logprobs[:count],
            "abort",
            self.topk[:count],
            tuple(replace(span, end=min(span.end, count)) for span in self.versions if span.start < count),
        )

    def then(self, rest: "GeneratedSequence") -> "GeneratedSequence":
        return GeneratedSequence(
            self.tokens + rest.tokens,
            self.logprobs + rest.logprobs,
            rest.finish,
            self.topk + rest.topk,
            _joined(self.versions, rest.versions, len(self.tokens)),
        )


def _joined(
    head: tuple[VersionSpan, ...], tail: tuple[VersionSpan, ...], offset: int
) -> tuple[VersionSpan, ...]:
    moved = tuple(replace(span, start=span.start + offset, end=span.end + offset) for span in tail)
    if head and moved and head[-1].version == moved[0].version:
        return (*head[:-1], replace(head[-1], end=moved[0].end), *moved[1:])
    return head + moved


@dataclass(frozen=True, slots=True)
class VllmResponse:
    """`scored`: the prompt's scores are there, or none were asked for."""

    sequences: tuple[GeneratedSequence, ...]
    cached_tokens: int
    scored: bool
    prompt_logprobs: tuple[float, ...] | None = None
    topk_prompt_logprobs: tuple[TopkRow, ...] | None = None
    scores: PromptScores | None = None


def parse(payload: Mapping[str, Any], request: SampleRequest) -> VllmResponse:
    """SamplerError when a prompt was not scored although nothing was aborted; UserError for weights that give
    no numbers."""
    choices = sorted(payload["choices"], key=lambda choice: int(choice["index"]))
    details = payload["usage"].get("prompt_tokens_details") or {}
    rows, matrix = payload.get("prompt_logprobs"), payload.get("prompt_token_id_logprobs")
    listed = bool(request.prompt_logprobs or request.topk_prompt_logprobs)
    missing = (listed and (rows is None or len(rows) < len(request.prompt))) or (
        prompt_scores.asked(request) and matrix is None
    )
    answer = VllmResponse(
        tuple(_generated(choice, payload.get("model"), request.topk_sample_logprobs) for choice in choices),
        details.get("cached_tokens") or 0,
        scored=not missing,
    )
    if missing:
        _require_abort(answer)
        return answer
    return replace(
        answer,
        prompt_logprobs=_prompt_logprobs(rows or (), request) if request.prompt_logprobs else None,
        topk_prompt_logprobs=_topk_prompt(rows or (), request) if request.topk_prompt_logprobs else None,
        scores=prompt_scores.unpack(matrix, request) if matrix is not None else None,
    )


def _require_abort(answer: VllmResponse) -> None:
    if all(sequence.finish != "abort" for sequence in answer.sequences):
        raise SamplerError(
            "the sampler left the prompt unscored: does it run with skyrl-tinker's vLLM plugin "
            "(SKYRL_TINKER_VLLM=1)?"
        )


def _generated(choice: Mapping[str, Any], model: str | None, topk: int) -> GeneratedSequence:
    content = (choice["logprobs"] or {}).get("content") or ()
    tokens = tuple(choice["token_ids"] or ())
    logprobs = tuple(float(position["logprob"]) for position in content)
    if min(logprobs, default=0.0) <= VLLM_LEAST_LOGPROB:  # nobody draws a token of which this is true
        raise diverged()
    return GeneratedSequence(
        tokens,
        logprobs,
        choice["finish_reason"],
        tuple(_topk_sampled(position, topk) for position in content) if topk else (),
        _versions(choice, model, len(tokens)),
    )


def diverged() -> UserError:
    return UserError(
        "the weights give logprobs that are not finite numbers: their training has diverged; "
        "go back to an earlier checkpoint"
    )


def _topk_sampled(position: Mapping[str, Any], k: int) -> TopkRow:
    return best(((int(each["token_id"]), float(each["logprob"])) for each in position["top_logprobs"]), k)


def best(candidates: Iterable[tuple[int, float]], k: int) -> TopkRow:
    """The k most likely, the most likely first; of equal ones the lower token first."""
    return tuple(sorted(candidates, key=lambda each: (-each[1], each[0]))[:k])


def _versions(choice: Mapping[str, Any], model: str | None, count: int) -> tuple[VersionSpan, ...]:
    """An adapter is named by itself. For full weights vLLM says which version made which tokens."""
    if count == 0:
        return ()
    if model is not None and model != BASE_MODEL:
        return (VersionSpan(model, 0, count),)
    spans: Sequence[Mapping[str, Any]] = choice.get("weight_versions") or ()
    named = (VersionSpan(_version_name(span["version"]), span["start"], span["end"]) for span in spans)
    return tuple(span for span in named if span.end > span.start)


def _version_name(name: str) -> str:
    return BASE_MODEL if name == VLLM_START_VERSION else name


Rows = Sequence[Mapping[str, Any] | None]


def _prompt_logprobs(rows: Rows, request: SampleRequest) -> tuple[float, ...]:
    """[len(prompt)]; the first token has no predecessor, those before the last n are not asked for."""
    first = first_scored(request)
    return tuple(
        float(row[str(token)]["logprob"]) if row is not None and index >= first else math.nan
        for index, (row, token) in enumerate(zip(rows, request.prompt, strict=True))
    )


def _topk_prompt(rows: Rows, request: SampleRequest) -> tuple[TopkRow, ...]:
    """vLLM lists the prompt's own token, too, also where it is not among the k most likely."""
    first, k = first_scored(request), request.topk_prompt_logprobs
    return tuple(
        best(((int(token), float(entry["logprob"])) for token, entry in row.items()), k)
        if row is not None and index >= first
        else ()
        for index, row in enumerate(rows)
    )


def first_scored(request: SampleRequest) -> int:
    """The first prompt position that is asked for."""
    last_n = request.prompt_logprobs_last_n
    return 1 if last_n is None else max(1, len(request.prompt) - last_n)


def output(
    request: SampleRequest, answers: Sequence[VllmResponse], sequences: Sequence[GeneratedSequence]
) -> SampleOutput:
    """Sequences in order of index; at temperature 0 the one sequence is repeated."""
    copies = request.num_samples // len(sequences) if request.params.temperature == 0 else 1
    first, targets = answers[0], request.target_prompt_logprobs
    scores = first.scores or PromptScores()
    return SampleOutput(
        tuple(_sampled(sequence) for sequence in sequences) * copies,
        first.prompt_logprobs,
        first.cached_tokens,
        first.topk_prompt_logprobs,
        TargetLogprobs(targets, scores.targets) if targets is not None else None,
        scores.draws if scores.draws or not request.prompt_alt_tokens_k else _no_draws(request),
    )


def _no_draws(request: SampleRequest) -> AltTokens:
    """A prompt of one token has no position after the first."""
    return AltTokens(request.prompt_alt_tokens_k, (), ())


def _sampled(sequence: GeneratedSequence) -> SampledSequence:
    if sequence.finish == "abort":
        raise AssertionError("aborted sequences are completed before they are handed out")
    return SampledSequence(
        sequence.tokens, sequence.logprobs, sequence.finish, sequence.topk, sequence.versions
    )

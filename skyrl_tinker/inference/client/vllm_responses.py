"""vLLM's responses as Tinker's: parsed, resumed where they were aborted, joined. Pure."""

import base64
import io
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from skyrl_tinker.domain.values import (
    AltTokens,
    Float32,
    RoutedExperts,
    SampledSequence,
    SampleOutput,
    SampleRequest,
    TargetLogprobs,
    TargetTokens,
    TopkRow,
    VersionSpan,
)
from skyrl_tinker.errors import SamplerError, UserError
from skyrl_tinker.inference.client.vllm_requests import needs_plugin, stop_strings, target_table
from skyrl_tinker.inference.constants import BASE_MODEL, VLLM_START_VERSION

VLLM_LEAST_LOGPROB = -9999.0
"""vLLM's replacement for what is less, or no number."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""How the tokenizer writes the first bytes of a character whose others are missing."""
LONGEST_INCOMPLETE = 3  # bytes, and so tokens at most
BYTES = LONGEST_INCOMPLETE + 1
CONTEXT_TOKENS = 8
"""Tokens before others that are detokenized with them: some tokenizers write a first token differently."""
TRIAL = {
    "token_ids": [0, 0],  # of one token, vLLM's ExampleConnector dies
    "sampling_params": {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 2},
}
"""Fields of a request whose answer tells what the server was started with."""
TextOf = Callable[[tuple[int, ...]], Awaitable[str]]
Rows = Sequence[Mapping[str, Any] | None]


@dataclass(frozen=True, slots=True)
class GeneratedSequence:
    """One sequence as vLLM left it; `abort`: it was interrupted and has to be resumed."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length", "abort"]
    topk: tuple[TopkRow, ...] = ()  # [len(tokens)] when asked for
    versions: tuple[VersionSpan, ...] = ()
    experts: RoutedExperts | None = None  # of the prompt and of all tokens but the last, when asked for

    def first(self, count: int) -> "GeneratedSequence":
        """Return the first tokens only, still aborted."""
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
    """Return the experts under which the kept tokens were sampled, and those of the rest after them."""
    if kept is None or resumed is None:
        return resumed if kept is None else kept
    return np.concatenate([kept, resumed[len(kept) :]])


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The plugin's scores; `targets` in the order of TargetTokens.tokens, 0.0 where nothing was requested."""

    targets: tuple[float, ...] = ()
    draws: AltTokens | None = None


@dataclass(frozen=True, slots=True)
class VllmResponse:
    """One response of vLLM. `scored`: the prompt's scores are there, or none were requested.

    `switched`: the request's tag was aborted, so aborted sequences go on under other weights. `replica`: the
    address of the server that answered; None of one that others started.
    """

    sequences: tuple[GeneratedSequence, ...]
    cached_tokens: int
    scored: bool
    switched: bool = False
    replica: str | None = None
    prompt_logprobs: tuple[float, ...] | None = None
    topk_prompt_logprobs: tuple[TopkRow, ...] | None = None
    scores: PromptScores | None = None


def parse(
    payload: Mapping[str, Any], request: SampleRequest, *, switched: bool = False, replica: str | None = None
) -> VllmResponse:
    """Parse vLLM's JSON.

    SamplerError when a prompt was not scored although nothing was aborted; UserError for weights that give no
    numbers.
    """
    choices = sorted(payload["choices"], key=lambda choice: int(choice["index"]))
    details = payload["usage"].get("prompt_tokens_details") or {}
    rows, matrix = payload.get("prompt_logprobs"), payload.get("prompt_token_id_logprobs")
    listed = bool(request.prompt_logprobs or request.topk_prompt_logprobs)
    missing = (listed and (rows is None or len(rows) < len(request.prompt))) or (
        needs_plugin(request) and matrix is None
    )
    response = VllmResponse(
        tuple(_generated(choice, payload.get("model"), request) for choice in choices),
        details.get("cached_tokens") or 0,
        not missing,
        switched,
        replica,
    )
    if missing and all(sequence.finish != "abort" for sequence in response.sequences):
        raise SamplerError(
            "the sampler left the prompt unscored: does it run with skyrl-tinker's vLLM plugin "
            "(SKYRL_TINKER_VLLM=1)?"
        )
    if missing or (not listed and matrix is None):
        return response
    return replace(
        response,
        prompt_logprobs=_prompt_logprobs(rows or (), request) if request.prompt_logprobs else None,
        topk_prompt_logprobs=_topk_prompt(rows or (), request) if request.topk_prompt_logprobs else None,
        scores=_prompt_scores(matrix, request) if matrix is not None else None,
    )


def _generated(choice: Mapping[str, Any], model: str | None, request: SampleRequest) -> GeneratedSequence:
    topk = request.topk_sample_logprobs
    content = choice["logprobs"] or ()
    if isinstance(content, Mapping):  # not packed
        content = content.get("content") or ()
        logprobs = tuple(float(position["logprob"]) for position in content)
    else:
        logprobs = tuple(content)
    tokens = tuple(choice["token_ids"] or ())
    if not all(logprob > VLLM_LEAST_LOGPROB for logprob in logprobs):  # too unlikely to be drawn
        raise diverged()
    return GeneratedSequence(
        tokens,
        logprobs,
        choice["finish_reason"],
        tuple(_topk_sampled(position, topk) for position in content) if topk else (),
        _versions(choice, model, len(tokens)),
        _experts(choice, len(request.prompt) + len(tokens) - 1)
        if request.routed_experts and tokens
        else None,
    )


def _experts(choice: Mapping[str, Any], length: int) -> RoutedExperts:
    """Read base64 of a .npy file. SamplerError unless it has the experts of so many tokens."""
    encoded = choice.get("routed_experts")
    experts: RoutedExperts = np.empty(0, np.uint8) if encoded is None else _array(encoded)
    if len(experts) != length:
        raise SamplerError(
            f"the sampler returned the experts of {len(experts)} tokens, expected {length}: does it run with "
            "--enable-return-routed-experts and skyrl-tinker's vLLM plugin?"
        )
    return experts if experts.dtype == np.uint8 else experts.astype(np.int16)


def _array(encoded: str) -> Any:
    return np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)


def diverged() -> UserError:
    return UserError(
        "the weights give logprobs that are not finite numbers: their training has diverged; "
        "go back to an earlier checkpoint"
    )


def _topk_sampled(position: Mapping[str, Any], k: int) -> TopkRow:
    """Return the k most likely, less where top_k or top_p left fewer and logprobs are processed ones."""
    listed = ((int(entry["token_id"]), float(entry["logprob"])) for entry in position["top_logprobs"])
    return _best((candidate for candidate in listed if candidate[1] > VLLM_LEAST_LOGPROB), k)


def _best(candidates: Iterable[tuple[int, float]], k: int) -> TopkRow:
    """Return the k most likely (token, logprob), best first; of equal ones the lower token first."""
    return tuple(sorted(candidates, key=lambda candidate: (-candidate[1], candidate[0]))[:k])


def _versions(choice: Mapping[str, Any], model: str | None, count: int) -> tuple[VersionSpan, ...]:
    """Return spans of tokens by weight version: the adapter's name; for full weights as vLLM reports them."""
    if count == 0:
        return ()
    if model is not None and model != BASE_MODEL:
        return (VersionSpan(model, 0, count),)
    spans: Sequence[Mapping[str, Any]] = choice.get("weight_versions") or ()
    named = (VersionSpan(_version_name(span["version"]), span["start"], span["end"]) for span in spans)
    return tuple(span for span in named if span.end > span.start)


def _version_name(name: str) -> str:
    return BASE_MODEL if name == VLLM_START_VERSION else name


def _prompt_logprobs(rows: Rows, request: SampleRequest) -> tuple[float, ...]:
    """Return [len(prompt)]; NaN for the first, which has no predecessor, and for those before the last n."""
    first = _first_scored(request)
    return tuple(
        float(row[str(token)]["logprob"]) if row is not None and index >= first else math.nan
        for index, (row, token) in enumerate(zip(rows, request.prompt, strict=True))
    )


def _topk_prompt(rows: Rows, request: SampleRequest) -> tuple[TopkRow, ...]:
    """Return [len(prompt)]; vLLM also lists the prompt's own token, where it is not among the k best."""
    first, k = _first_scored(request), request.topk_prompt_logprobs
    return tuple(
        _best(((int(token), float(entry["logprob"])) for token, entry in row.items()), k)
        if row is not None and index >= first
        else ()
        for index, row in enumerate(rows)
    )


def _first_scored(request: SampleRequest) -> int:
    """Return the first prompt position whose score was requested."""
    last_n = request.prompt_logprobs_last_n
    return 1 if last_n is None else max(1, len(request.prompt) - last_n)


def _prompt_scores(matrix: str, request: SampleRequest) -> PromptScores:
    """Read the plugin's matrix: base64 of a .npy file with rows [first, len(prompt) - 1)."""
    scores: Float32 = _array(matrix)
    table = target_table(request)
    width, draws = table.shape[1], request.prompt_alt_tokens_k
    whole = np.zeros((len(table), width), np.float32)
    whole[len(table) - len(scores) :] = scores[:, :width]
    return PromptScores(
        _in_order(request.target_prompt_logprobs, np.where(table >= 0, whole, np.float32(0))),
        _alt_tokens(scores[:, width:], draws) if draws else None,
    )


def _in_order(targets: TargetTokens | None, whole: Float32) -> tuple[float, ...]:
    """Return [cells] in the order of targets.tokens."""
    if targets is None:
        return ()
    if targets.crow is None:
        return tuple(whole.ravel().tolist())
    lengths = [end - start for start, end in pairwise(targets.crow)]
    return tuple(value for row, length in zip(whole.tolist(), lengths, strict=True) for value in row[:length])


def _alt_tokens(columns: Float32, draws: int) -> AltTokens:
    logprobs, tokens = columns[:, :draws].tolist(), columns[:, draws:].astype(np.int64).tolist()
    return AltTokens(draws, tuple(map(tuple, tokens)), tuple(map(tuple, logprobs)))


def logprobs_mode(payload: Mapping[str, Any]) -> Literal["raw", "processed"] | None:
    """Tell --logprobs-mode by the answer to TRIAL.

    top_k excludes the second token, which only processed logprobs show. None where the weights give no
    numbers.
    """
    (position,) = payload["choices"][0]["logprobs"]["content"]
    if not position["logprob"] > VLLM_LEAST_LOGPROB:
        return None
    least = min(entry["logprob"] for entry in position["top_logprobs"])
    return "processed" if least <= VLLM_LEAST_LOGPROB else "raw"


def lists_experts(payload: Mapping[str, Any]) -> bool:
    """Tell --enable-return-routed-experts by the answer to TRIAL."""
    return payload["choices"][0].get("routed_experts") is not None


# Resuming


async def resumable(
    request: SampleRequest, aborted: GeneratedSequence, *, switched: bool, text_of: TextOf
) -> GeneratedSequence:
    """Return the part of an aborted sequence that is kept: it goes on after that, with the logprobs it has.

    * A seeded sequence cannot take up its random numbers in the middle. When nothing but a pause aborted it,
      it starts over and comes out as if never interrupted. When its policy was switched
      (ControlPlane.abort), there is nothing to reproduce, and starting over at each switch it might never
      end: it continues, its further random numbers drawn from a seed made of its own seed and the number of
      tokens it has.
    * vLLM looks for stop strings in the text of one request only. So the tokens kept are the longest prefix
      whose text does not end in the beginning of a stop string; what follows is sampled again.
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
    """Return the text of `tokens`, which follow `before`, or of a long one its last `most` characters."""
    characters = most + CONTEXT_TOKENS  # where it is cut, they may differ
    count = BYTES * characters
    while True:
        behind = min(count, len(tokens))
        tail = (before + tokens)[-(CONTEXT_TOKENS + behind) :]
        text = (await text_of(tail))[len(await text_of(tail[:-behind])) :]
        if len(text) >= characters or behind == len(tokens):
            return text
        count *= BYTES  # there are tokens without text


def _ends_in_stop(generated: str, stops: tuple[str, ...]) -> bool:
    """Return whether a stop string may have begun at the end of the text."""
    ending = len(generated) - len(generated.rstrip(REPLACEMENT))
    if 0 < ending <= LONGEST_INCOMPLETE and not all(stop.isascii() for stop in stops):
        return True
    return any(generated.endswith(stop[:length]) for stop in stops for length in range(1, len(stop)))


def join(request: SampleRequest, responses: Sequence[VllmResponse]) -> SampleOutput:
    """Join the responses to the parts of `request`; the first has the prompt's scores.

    At temperature 0 the one sequence is repeated.
    """
    first, sequences = responses[0], [sequence for part in responses for sequence in part.sequences]
    copies = request.num_samples // len(sequences) if request.params.temperature == 0 else 1
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

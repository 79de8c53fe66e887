"""Tinker's sample request as vLLM's, and vLLM's answer as Tinker's. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from skyrl_tinker.errors import UserError
from skyrl_tinker.inference.spec import MAX_SEQUENCES
from skyrl_tinker.wire.values import SampledSequence, SampleOutput, SampleRequest, SamplingParams

SEEDS = 1 << 63
"""Seeds are taken modulo this."""


@dataclass(frozen=True, slots=True)
class Generated:
    """One sequence as vLLM left it; `abort` means that it was cut short by a weight update."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Answer:
    sequences: tuple[Generated, ...]
    prompt_logprobs: tuple[float, ...] | None
    cached_tokens: int


def split(request: SampleRequest) -> list[SampleRequest]:
    """Requests that vLLM can serve, with consecutive seeds: cut at MAX_SEQUENCES and where seed + i wraps.

    At temperature 0 all samples are the same, so one is asked for. The first part scores the prompt.
    """
    count = 1 if request.params.temperature == 0 else request.num_samples
    parts: list[SampleRequest] = []
    start = 0
    while start < count:
        seed = _seed(request.params, start)
        size = min(count - start, MAX_SEQUENCES, SEEDS if seed is None else SEEDS - seed)
        params = replace(request.params, seed=seed)
        parts.append(SampleRequest(request.prompt, size, params, request.prompt_logprobs and start == 0))
        start += size
    return parts


def body(model: str, request: SampleRequest, *, eos: Sequence[int], context: int) -> dict[str, Any]:
    """JSON of POST /inference/v1/generate. UserError when the prompt leaves no room for a token."""
    params = request.params
    sampling = {
        "n": request.num_samples,
        "max_tokens": _max_tokens(request, context),
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "logprobs": 0,  # of the sampled token alone
        "detokenize": False,
        **_stop(params.stop, eos),
    }
    if params.seed is not None:
        sampling["seed"] = params.seed
    if request.prompt_logprobs:
        sampling["prompt_logprobs"] = 0
    return {"model": model, "token_ids": list(request.prompt), "sampling_params": sampling}


def _max_tokens(request: SampleRequest, context: int) -> int:
    if request.params.max_tokens is not None:
        return request.params.max_tokens
    left = context - len(request.prompt)
    if left < 1:
        raise UserError(
            f"{len(request.prompt)} prompt tokens leave nothing of a context of {context} to sample"
        )
    return left


def _stop(stop: tuple[str, ...] | tuple[int, ...] | None, eos: Sequence[int]) -> dict[str, Any]:
    """vLLM's own idea of EOS is off: which tokens end a sequence is said here alone."""
    if stop == ():
        return {"ignore_eos": True}
    ids = [item for item in stop or () if isinstance(item, int)]
    texts = [item for item in stop or () if isinstance(item, str)]
    fields: dict[str, Any] = {"ignore_eos": True, "stop_token_ids": [*eos, *ids]}
    return fields | {"stop": texts, "detokenize": True} if texts else fields


def _seed(params: SamplingParams, index: int) -> int | None:
    return None if params.seed is None else (params.seed + index) % SEEDS


def parse(payload: Mapping[str, Any], request: SampleRequest) -> Answer:
    choices = sorted(payload["choices"], key=lambda choice: int(choice["index"]))
    details = payload["usage"].get("prompt_tokens_details") or {}
    prompt = payload.get("prompt_logprobs") if request.prompt_logprobs else None
    scored = prompt is not None and len(prompt) == len(request.prompt)  # not when aborted early
    return Answer(
        tuple(_generated(choice) for choice in choices),
        _prompt_logprobs(prompt, request.prompt) if prompt is not None and scored else None,
        details.get("cached_tokens") or 0,
    )


def _generated(choice: Mapping[str, Any]) -> Generated:
    content = (choice["logprobs"] or {}).get("content") or ()
    return Generated(
        tuple(choice["token_ids"] or ()),
        tuple(float(position["logprob"]) for position in content),
        choice["finish_reason"],
    )


def _prompt_logprobs(rows: Sequence[Mapping[str, Any] | None], prompt: Sequence[int]) -> tuple[float, ...]:
    """[len(prompt)]; the first token has no predecessor."""
    return tuple(
        math.nan if row is None else float(row[str(token)]["logprob"])
        for row, token in zip(rows, prompt, strict=True)
    )


def remainder(
    request: SampleRequest, index: int, done: Generated, *, context: int
) -> tuple[Generated, SampleRequest]:
    """What to keep of an aborted sequence, and the request for the rest of it.

    A seeded sequence starts over, since its random numbers cannot be taken up in the middle; so does one with
    stop strings, since such a string may begin in what is there. Both then are as if never interrupted.
    """
    single = replace(request, num_samples=1, prompt_logprobs=False)
    if request.params.seed is not None or any(isinstance(item, str) for item in request.params.stop or ()):
        again = replace(single, params=replace(request.params, seed=_seed(request.params, index)))
        return Generated((), (), "abort"), again
    left = _max_tokens(request, context) - len(done.tokens)
    rest = replace(
        single, prompt=request.prompt + done.tokens, params=replace(request.params, max_tokens=left)
    )
    return done, rest


def join(kept: Generated, rest: Generated) -> Generated:
    return Generated(kept.tokens + rest.tokens, kept.logprobs + rest.logprobs, rest.finish)


def output(request: SampleRequest, answers: Sequence[Answer], sequences: Sequence[Generated]) -> SampleOutput:
    """Sequences in order of index; at temperature 0 the one sequence is repeated."""
    copies = request.num_samples // len(sequences) if request.params.temperature == 0 else 1
    return SampleOutput(
        tuple(_sampled(sequence) for sequence in sequences) * copies,
        answers[0].prompt_logprobs,
        answers[0].cached_tokens,
    )


def _sampled(sequence: Generated) -> SampledSequence:
    if sequence.finish == "abort":
        raise AssertionError("aborted sequences are completed before they are handed out")
    return SampledSequence(sequence.tokens, sequence.logprobs, sequence.finish)

"""SGLang 0.5.23 behind the port: requests of POST /generate and of OpenAI's clients, and answers. Pure.

A request is one sequence: SGLang would rename several, so that they could not be aborted.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from skyrl_tinker.domain.samples import SampleRequest, TopkRow
from skyrl_tinker.errors import NotFoundError, RequestGivenUpError, SamplerError, UserError
from skyrl_tinker.inference.client.generated import (
    GeneratedSequence,
    PromptScores,
    SamplerResponse,
    diverged,
    most_likely,
    refused,
    version_spans,
)
from skyrl_tinker.inference.client.sample_parts import (
    first_scored,
    max_tokens,
    scores_other_tokens,
    scores_prompt,
    stop_strings,
    target_scores,
    target_table,
)
from skyrl_tinker.inference.client.sampling_port import Advice, Json, Post
from skyrl_tinker.inference.constants import BASE_MODEL
from skyrl_tinker.inference.sglang.sglang_control import SglangControl

TRIAL: Json = {
    "input_ids": [0, 0],
    "sampling_params": {"max_new_tokens": 1, "temperature": 1e6},
    "return_logprob": True,
    "top_logprobs_num": 2,
}
"""Body of a request in which processed logprobs would all be the same."""
LEAST_LOGPROB = -1e38
"""Logprobs below it mean zero probability: SGLang writes the lowest float32, or null."""
SAME = 1e-4
NOT_LOADED = ("has never been loaded", "adapters are not loaded", "Failed to implicitly load")
Rows = Sequence[Sequence[Any] | None]
"""By position, [logprob, token, null] or a list of these; null for a position without."""


NAN_HAPPENED = "NaN happened"
"""Reason of an end that is none."""
NOT_OF_THE_MODEL: Json = {"min_p": 0.0, "repetition_penalty": 1.0}
"""Those of generation_config.json would take the place of values that are not given."""


def _openai_body(given: Json, model: str, priority: int) -> dict[str, Any]:
    named = BASE_MODEL if model == BASE_MODEL else f"{BASE_MODEL}:{model}"
    # With 0, it would leave the prompt unscored.
    scored = {"logprobs": 1} if given.get("echo") and given.get("logprobs") == 0 else {}
    return {**given, **NOT_OF_THE_MODEL, **scored, "model": named, "priority": priority}


class SglangAnswerReader:
    """Reader of one request's answer, or of the chunks of its stream in their order."""

    def __init__(self, request: Json) -> None:
        self._listed = bool(request.get("logprobs"))
        self._several = request["n"] > 1
        self._id = ""
        self._ends: dict[int, int] = defaultdict(int)  # of the tokens so far, in characters, by choice

    def __call__(self, answer: dict[str, Any]) -> dict[str, Any]:
        """UserError for weights that give no numbers."""
        answer.pop("metadata", None)
        self._id = answer["id"] = self._id or answer["id"]  # each choice of a stream has its own
        for choice in answer["choices"]:
            choice["stop_reason"] = choice.pop("matched_stop", None)
            if choice["stop_reason"] == NAN_HAPPENED:
                raise diverged()
            if "tokens" in (logprobs := choice.get("logprobs") or {}):
                self._complete(logprobs, choice["index"])
        if self._several and answer.get("usage"):
            # It computes each prompt before the samples, and says of each that all of it was cached.
            answer["usage"]["prompt_tokens_details"] = None
        return answer

    def _complete(self, logprobs: dict[str, Any], index: int) -> None:
        """Add what logprobs of a completion lack: places in the text, and sampled tokens in the lists."""
        tokens, values = logprobs["tokens"], logprobs["token_logprobs"]
        rows = logprobs["top_logprobs"] if self._listed else [{}] * len(tokens)
        logprobs["top_logprobs"] = [
            None if value is None else {token: value} | (row or {})
            for token, value, row in zip(tokens, values, rows, strict=True)
        ]
        ends = accumulate(map(len, tokens), initial=self._ends[index])
        *logprobs["text_offset"], self._ends[index] = ends


@dataclass(frozen=True)
class SglangDialect:
    path = "/generate"
    channels = False
    core_path = "/server_info"
    most_sequences = 1
    metrics_prefix = "sglang:"
    unbounded_metrics = frozenset[str]()
    pull_probe = None
    advice = Advice(
        routes=f"--served-model-name {BASE_MODEL} and --enable-lora",
        pull="on this host",
        context="--context-length {}",
        logprobs="SGLANG_RETURN_ORIGINAL_LOGPROB=1 in its environment",
        experts="another sampling engine",
    )
    trial = TRIAL
    control = SglangControl
    openai_body = staticmethod(_openai_body)
    openai_reader = SglangAnswerReader

    def body(self, model: str, request: SampleRequest, *, eos: Sequence[int], context: int) -> dict[str, Any]:
        params = request.params
        body = {
            "input_ids": list(request.prompt),
            "sampling_params": {
                "max_new_tokens": max_tokens(request, context),
                "temperature": params.temperature,
                "top_k": params.top_k,
                "top_p": params.top_p,
                **_stop(params.stop, eos),
            },
            "return_logprob": True,
            "top_logprobs_num": max(request.topk_sample_logprobs, request.topk_prompt_logprobs),
        }
        if scores_prompt(request):  # the first row has no logprob
            body["logprob_start_len"] = _first_row(request) - 1
        if targets := _targets(request):
            body["token_ids_logprob"] = targets  # at every position, sampled tokens included
        return body if model == BASE_MODEL else body | {"lora_path": model}

    def call(
        self, request: SampleRequest, attempt: str, priority: int
    ) -> tuple[dict[str, Any], dict[str, str]]:
        return {"rid": attempt, "priority": priority}, {}

    def parse(
        self, payload: Json, request: SampleRequest, *, model: str, switched: bool, replica: str | None
    ) -> SamplerResponse:
        meta = payload["meta_info"]
        finish = meta["finish_reason"]
        if finish.get("matched") == NAN_HAPPENED:
            raise diverged()
        rows = meta.get("input_token_logprobs") or ()
        first = first_scored(request)
        unlisted = first - _first_row(request) + 1  # rows before those of the prompt's last n tokens
        missing = scores_prompt(request) and len(rows) < len(request.prompt) - first + unlisted
        sequence = _generated(payload["output_ids"], meta, request, model)
        if missing and finish["type"] != "abort":
            raise SamplerError("the sampler left the prompt unscored")
        listed = request.topk_prompt_logprobs
        best = (meta.get("input_top_logprobs") or ())[unlisted:]
        return SamplerResponse(
            (sequence,),
            meta.get("cached_tokens") or 0,
            not missing,
            switched,
            replica,
            (*[math.nan] * first, *_finite(rows[unlisted:]))
            if request.prompt_logprobs and not missing
            else None,
            (*[()] * first, *(_best(row or (), listed) for row in best)) if listed and not missing else None,
            None if missing else _scores(meta.get("input_token_ids_logprobs") or (), request),
        )

    def logprobs_mode(self, payload: Json) -> Literal["raw", "processed"] | None:
        meta = payload["meta_info"]
        values = [row[0] for row in meta["output_top_logprobs"][0]]
        if any(value is None or math.isnan(value) for value in values):
            return None
        return "processed" if max(values) - min(values) < SAME else "raw"

    def lists_experts(self, payload: Json) -> bool:
        return False

    def refusal(self, status: int, message: str) -> UserError | SamplerError:
        if any(words in message for words in NOT_LOADED):
            return NotFoundError("the sampler has not loaded this adapter")  # its message lists all others
        if status == 500 and "Grammar accept_token failed" in message:
            return RequestGivenUpError("the sampler gave the request up")
        return refused(status, message)

    async def detokenize(self, post: Post, tokens: Sequence[int]) -> str:
        body = {"model": BASE_MODEL, "tokens": list(tokens), "skip_special_tokens": False}
        return str((await post("/detokenize", body))["text"])


def _stop(stop: tuple[str, ...] | tuple[int, ...] | None, eos: Sequence[int]) -> dict[str, Any]:
    """List the tokens and texts that end a sequence. `ignore_eos` would switch listed tokens off as well."""
    if stop == ():
        return {"ignore_eos": True}
    ids = [item for item in stop or () if isinstance(item, int)]
    fields: dict[str, Any] = {"stop_token_ids": [*eos, *ids]}
    if texts := stop_strings(stop):
        fields |= {"stop": list(texts), "skip_special_tokens": False}
    return fields


def _generated(tokens: list[int], meta: Json, request: SampleRequest, model: str) -> GeneratedSequence:
    logprobs = tuple(_finite(meta.get("output_token_logprobs") or ()))
    k = request.topk_sample_logprobs
    best = meta.get("output_top_logprobs") or ()
    return GeneratedSequence(
        tuple(tokens),
        logprobs,
        meta["finish_reason"]["type"],
        tuple(_best(row, k) for row in best) if k else (),
        version_spans(meta, model, len(tokens)),
    )


def _targets(request: SampleRequest) -> list[int]:
    targets = request.target_prompt_logprobs
    return targets.distinct if targets is not None and scores_other_tokens(request) else []


def _first_row(request: SampleRequest) -> int:
    """Return the first prompt position that is scored: targets are scored at all positions."""
    return 1 if _targets(request) else first_scored(request)


def _scores(rows: Sequence[Sequence[Sequence[Any]] | None], request: SampleRequest) -> PromptScores | None:
    """Read the requested logprobs; SGLang lists those of all targets at each position."""
    if not (targets := _targets(request)):
        return None
    each = np.array([[*_finite(row or ())] for row in rows[1:]], np.float32)
    columns = np.searchsorted(targets, target_table(request))  # for an empty cell: any column
    return PromptScores(target_scores(request, np.take_along_axis(each, columns, 1)))


def _finite(rows: Rows) -> Iterable[float]:
    """Yield the logprobs. Raises UserError if one is not a finite number."""
    for row in rows:
        if row is None or row[0] is None or not row[0] > LEAST_LOGPROB:
            raise diverged()
        yield float(row[0])


def _best(row: Sequence[Sequence[Any]], k: int) -> TopkRow:
    listed = ((int(token), value) for value, token, _ in row if value is not None)
    return most_likely((each for each in listed if each[1] > LEAST_LOGPROB), k)


SGLANG = SglangDialect()

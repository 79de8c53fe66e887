"""OpenAI's requests as SGLang 0.5.23 takes them, and its answers as vLLM writes them. Pure."""

from collections import defaultdict
from itertools import accumulate
from typing import Any

from skyrl_tinker.inference.client.generated import diverged
from skyrl_tinker.inference.client.sampling_port import Json
from skyrl_tinker.inference.constants import BASE_MODEL

NAN_HAPPENED = "NaN happened"
"""Reason of an end that is none."""
NOT_OF_THE_MODEL: Json = {"min_p": 0.0, "repetition_penalty": 1.0}
"""Those of generation_config.json would take the place of values that are not given."""


def body(given: Json, model: str, priority: int) -> dict[str, Any]:
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

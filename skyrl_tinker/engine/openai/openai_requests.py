"""OpenAI's requests as vLLM's: which tokens end a sequence and how long it may be is said here. Pure."""

from collections.abc import Sequence
from typing import Any

from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.protocol.schemas.openai import (
    COMPLETION_MAX_TOKENS,
    ChatCompletionRequest,
    CompletionRequest,
    FieldError,
)

Wanted = CompletionRequest | ChatCompletionRequest
_OURS = {"model", "user", "max_tokens", "max_completion_tokens", "stream_options"}
LONGEST_TOKEN = 1024
"""Characters of a tokenizer's longest token, and more: a text that even so does not fit is not counted."""


def texts_to_count(wanted: Wanted, facts: BaseModelFacts) -> list[dict[str, Any]]:
    """Bodies of /tokenize for the prompts whose length is not known yet. FieldError for an endless one."""
    bodies = _texts(wanted)
    most = LONGEST_TOKEN * facts.context_length
    for body in bodies:
        _require_short(body, most, facts.context_length)
    return bodies


def _require_short(body: dict[str, Any], most: int, context: int) -> None:
    field, found = next(iter(body.items()))
    size = len(found) if isinstance(found, str) else sum(map(_characters, found))
    if size > most:
        message = f"{field}: {size} characters, expected at most {most} for {context} tokens of context"
        raise FieldError(message, field, "context_length_exceeded")


def _characters(message: dict[str, Any]) -> int:
    content = message["content"]
    return len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)


def _texts(wanted: Wanted) -> list[dict[str, Any]]:
    if isinstance(wanted, ChatCompletionRequest):
        return [{"messages": [message.model_dump(exclude_none=True) for message in wanted.messages]}]
    prompts = [wanted.prompt] if isinstance(wanted.prompt, str) else wanted.prompt
    return [{"prompt": prompt} for prompt in prompts if isinstance(prompt, str)]


def longest_prompt(wanted: Wanted, counts: Sequence[int], facts: BaseModelFacts) -> int:
    """In tokens; `counts` are those of texts_to_count. FieldError for a token id that there is not."""
    lists = _token_lists(wanted)
    for tokens in lists:
        for token in tokens:
            if not 0 <= token < facts.vocab_size:
                raise FieldError(
                    f"prompt: found token {token}, expected 0 .. {facts.vocab_size - 1}", "prompt"
                )
    return max([*counts, *map(len, lists)])


def _token_lists(wanted: Wanted) -> list[list[int]]:
    if isinstance(wanted, ChatCompletionRequest) or isinstance(wanted.prompt, str):
        return []
    flat = [token for token in wanted.prompt if isinstance(token, int)]
    return [flat] if flat else [tokens for tokens in wanted.prompt if isinstance(tokens, list)]


def upstream_body(wanted: Wanted, prompt_tokens: int, facts: BaseModelFacts) -> dict[str, Any]:
    """vLLM's body without the model. FieldError with the numbers when it does not fit the context."""
    body = wanted.model_dump(exclude=_OURS, exclude_none=True)
    body["max_tokens"] = _max_tokens(wanted, prompt_tokens, facts.context_length)
    # vLLM knows one EOS at most: all of them are said here, as they are for samples.
    body |= {"ignore_eos": True, "stop_token_ids": list(facts.eos_token_ids)}
    return body | {"stream_options": {"include_usage": True}} if wanted.stream else body


def _max_tokens(wanted: Wanted, prompt_tokens: int, context: int) -> int:
    asked = wanted.max_tokens
    if isinstance(wanted, ChatCompletionRequest):
        asked = wanted.max_completion_tokens if asked is None else asked
        asked = max(1, context - prompt_tokens) if asked is None else asked
    elif asked is None:
        asked = COMPLETION_MAX_TOKENS
    if prompt_tokens + asked > context:
        field = "messages" if isinstance(wanted, ChatCompletionRequest) else "prompt"
        message = f"{prompt_tokens} prompt tokens + {asked} max_tokens > {context}, the context length"
        raise FieldError(message, field, "context_length_exceeded")
    return asked

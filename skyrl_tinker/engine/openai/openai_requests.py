"""Translation of OpenAI's requests to vLLM's, with end-of-sequence tokens and lengths set here. Pure."""

from collections.abc import Sequence
from typing import Any

from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.protocol.schemas.openai import (
    COMPLETION_MAX_TOKENS,
    ChatCompletionRequest,
    CompletionRequest,
    FieldError,
)

OpenAIRequest = CompletionRequest | ChatCompletionRequest
_NOT_FORWARDED = {"model", "user", "max_tokens", "max_completion_tokens", "stream_options"}
LONGEST_TOKEN = 1024
"""Upper bound of the characters in a token: a text that cannot fit even so is refused without counting."""


def texts_to_count(request: OpenAIRequest, facts: BaseModelFacts) -> list[dict[str, Any]]:
    """Return bodies of /tokenize for the prompts of unknown length. Raises FieldError for a huge one."""
    bodies = _texts(request)
    most = LONGEST_TOKEN * facts.context_length
    for body in bodies:
        _require_short(body, most, facts.context_length)
    return bodies


def _require_short(body: dict[str, Any], most: int, context: int) -> None:
    field, value = next(iter(body.items()))
    size = len(value) if isinstance(value, str) else sum(map(_characters, value))
    if size > most:
        message = f"{field}: {size} characters, expected at most {most} for {context} tokens of context"
        raise FieldError(message, field, "context_length_exceeded")


def _characters(message: dict[str, Any]) -> int:
    content = message["content"]
    return len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)


def _texts(request: OpenAIRequest) -> list[dict[str, Any]]:
    if isinstance(request, ChatCompletionRequest):
        return [{"messages": [message.model_dump(exclude_none=True) for message in request.messages]}]
    prompts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    return [{"prompt": prompt} for prompt in prompts if isinstance(prompt, str)]


def longest_prompt(request: OpenAIRequest, counts: Sequence[int], facts: BaseModelFacts) -> int:
    """Return the tokens of the longest prompt; `counts`: of texts_to_count. FieldError: unknown token id."""
    lists = _token_lists(request)
    for tokens in lists:
        for token in tokens:
            if not 0 <= token < facts.vocab_size:
                raise FieldError(
                    f"prompt: found token {token}, expected 0 .. {facts.vocab_size - 1}", "prompt"
                )
    return max([*counts, *map(len, lists)])


def _token_lists(request: OpenAIRequest) -> list[list[int]]:
    if isinstance(request, ChatCompletionRequest) or isinstance(request.prompt, str):
        return []
    flat = [token for token in request.prompt if isinstance(token, int)]
    return [flat] if flat else [tokens for tokens in request.prompt if isinstance(tokens, list)]


def upstream_body(request: OpenAIRequest, prompt_tokens: int, facts: BaseModelFacts) -> dict[str, Any]:
    """Return vLLM's body without the model. Raises FieldError with the numbers if it exceeds the context."""
    body = request.model_dump(exclude=_NOT_FORWARDED, exclude_none=True)
    body["max_tokens"] = _max_tokens(request, prompt_tokens, facts.context_length)
    # vLLM knows one EOS at most: all of them are given here, as for samples.
    body |= {"ignore_eos": True, "stop_token_ids": list(facts.eos_token_ids)}
    return body | {"stream_options": {"include_usage": True}} if request.stream else body


def _max_tokens(request: OpenAIRequest, prompt_tokens: int, context: int) -> int:
    limit = request.max_tokens
    if isinstance(request, ChatCompletionRequest):
        limit = request.max_completion_tokens if limit is None else limit
        limit = max(1, context - prompt_tokens) if limit is None else limit
    elif limit is None:
        limit = COMPLETION_MAX_TOKENS
    if prompt_tokens + limit > context:
        field = "messages" if isinstance(request, ChatCompletionRequest) else "prompt"
        message = f"{prompt_tokens} prompt tokens + {limit} max_tokens > {context}, the context length"
        raise FieldError(message, field, "context_length_exceeded")
    return limit

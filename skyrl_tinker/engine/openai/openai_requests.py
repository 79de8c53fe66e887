"""OpenAI's requests in the samplers' format, with end-of-sequence tokens and lengths. Pure."""

from collections.abc import Sequence
from typing import Any

import orjson

from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.engine.openai.chat_abilities import ChatAbilities
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.schemas.chats import ChatCompletionRequest
from skyrl_tinker.protocol.schemas.openai import COMPLETION_MAX_TOKENS, CompletionRequest, FieldError
from skyrl_tinker.protocol.schemas.sampling import overflow
from skyrl_tinker.protocol.validation.limits import check_ids
from skyrl_tinker.protocol.validation.openai import check_openai
from skyrl_tinker.protocol.validation.scores import MAX_LISTED

OpenAIRequest = CompletionRequest | ChatCompletionRequest
_FORWARDED = {
    "prompt",
    "add_special_tokens",
    "messages",
    "n",
    "temperature",
    "top_p",
    "top_k",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stream",
    "echo",
    "logprobs",
    "top_logprobs",
}
LONGEST_TOKEN = 1024
"""Upper bound of characters per token: a text that is too long even so is refused without tokenizing it."""


def texts_to_count(
    request: OpenAIRequest, facts: BaseModelFacts, abilities: ChatAbilities
) -> list[dict[str, Any]]:
    """Return bodies of /tokenize for the prompts of unknown length. Raises FieldError for a huge one."""
    bodies = _texts(request, abilities)
    most = LONGEST_TOKEN * facts.context_length
    for body in bodies:
        _require_short(body, most, facts.context_length)
    return bodies


def _require_short(body: dict[str, Any], most: int, context: int) -> None:
    field, value = next(iter(body.items()))
    size = len(value) if isinstance(value, str) else sum(map(_characters, value))
    size += sum(len(orjson.dumps(body[also])) for also in ("chat_template_kwargs", "tools") if also in body)
    if size > most:
        message = f"{field}: {size} characters, expected at most {most} for {context} tokens of context"
        raise FieldError(message, field, "context_length_exceeded")


def _characters(message: dict[str, Any]) -> int:
    content = message["content"]
    size = len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)
    return size + len(orjson.dumps(message.get("tool_calls", ()))) + len(message.get("reasoning", ""))


def _texts(request: OpenAIRequest, abilities: ChatAbilities) -> list[dict[str, Any]]:
    if isinstance(request, ChatCompletionRequest):
        messages = [message.model_dump(exclude_none=True) for message in request.messages]
        shown = {"tools", "tool_choice"}  # with none, SGLang shows no tools
        tools = {name: value for name, value in _tools(request, abilities).items() if name in shown}
        return [{"messages": messages, **tools, **_template_variables(request, abilities)}]
    prompts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    added = {"add_special_tokens": request.add_special_tokens}
    return [{"prompt": prompt, **added} for prompt in prompts if isinstance(prompt, str)]


def require_one_sequence(request: OpenAIRequest, prompts: int) -> None:
    """Refuse several sequences with disaggregation: only one may fetch the prompt's keys and values."""
    count = prompts * request.sequences
    if count > 1:
        raise FieldError(f"n: found {count} sequences in all, expected 1 with prefill_urls", "n")


def repeated(response: dict[str, Any], times: int) -> dict[str, Any]:
    """Return a response, or a chunk of one, with each choice so many times."""
    changed: dict[str, Any] = {
        "choices": [
            {**choice, "index": choice["index"] * times + copy}
            for choice in response["choices"]
            for copy in range(times)
        ]
    }
    if usage := response.get("usage"):
        tokens = times * (usage.get("completion_tokens") or 0)
        total = {"completion_tokens": tokens, "total_tokens": usage["prompt_tokens"] + tokens}
        changed["usage"] = usage | total
    return response | changed


def prompt_lengths(request: OpenAIRequest, counts: Sequence[int], facts: BaseModelFacts) -> list[int]:
    """Return the tokens of each prompt; `counts`: of texts_to_count. FieldError: unknown id, or none."""
    lists = _token_lists(request)
    for tokens in lists:
        _require_known(tokens, "prompt", facts)
    lengths = [*counts, *map(len, lists)]
    if 0 in lengths:
        chat = isinstance(request, ChatCompletionRequest)
        name = "messages" if chat else f"prompt[{lengths.index(0)}]"
        raise FieldError(f"{name}: empty, expected at least one token", "messages" if chat else "prompt")
    _require_few_listed(request, sum(lengths))
    return lengths


def listed(request: OpenAIRequest, tokens: int) -> int:
    """Count the logprobs that an answer lists of prompts, which have so many tokens in all."""
    if not isinstance(request, CompletionRequest) or not request.echo or request.logprobs is None:
        return 0
    return tokens * request.n * max(1, request.logprobs)


def _require_few_listed(request: OpenAIRequest, tokens: int) -> None:
    """Refuse more logprobs of prompts than a sampler should send at once; `tokens`: of all prompts."""
    if (total := listed(request, tokens)) > MAX_LISTED:
        raise FieldError(
            f"logprobs: {tokens} prompt tokens x n {request.n} x {total // (tokens * request.n)} = {total}"
            f" with echo, expected at most {MAX_LISTED}: send fewer prompts at once",
            "logprobs",
        )


def _require_known(tokens: Sequence[int], field: str, facts: BaseModelFacts) -> None:
    try:
        check_ids(tokens, field, facts.vocab_size)
    except UserError as error:
        raise FieldError(str(error), field) from error


def _token_lists(request: OpenAIRequest) -> list[list[int]]:
    if isinstance(request, ChatCompletionRequest) or isinstance(request.prompt, str):
        return []
    flat = [token for token in request.prompt if isinstance(token, int)]
    return [flat] if flat else [tokens for tokens in request.prompt if isinstance(tokens, list)]


def upstream_body(
    request: OpenAIRequest, prompt_tokens: int, facts: BaseModelFacts, abilities: ChatAbilities
) -> dict[str, Any]:
    """Return the sampler's body without the fields of its dialect.

    Raises FieldError with the numbers if it exceeds the context, and for features that are not supported.
    """
    check_openai(request, facts.sampler)  # an API process may know those of another start
    body = request.model_dump(include=_FORWARDED, exclude_none=True)
    body["n"] = request.sequences
    body["max_tokens"] = _max_tokens(request, prompt_tokens, facts)
    body |= _stop(request, facts, abilities)
    if isinstance(request, ChatCompletionRequest):
        abilities.require_separation(request.separate_reasoning)
        body |= _tools(request, abilities) | _template_variables(request, abilities)
        if request.response_format is not None:
            body["response_format"] = request.response_format.model_dump(by_alias=True, exclude_none=True)
    if request.stream:  # usage in each chunk, to bill a client that leaves early
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    return body


def _stop(request: OpenAIRequest, facts: BaseModelFacts, abilities: ChatAbilities) -> dict[str, Any]:
    """List all stops of a sequence, all EOS tokens included, as for samples."""
    ids = [item for item in request.stop if isinstance(item, int)]
    _require_known(ids, "stop", facts)
    texts = [item for item in request.stop if isinstance(item, str)]
    ids = [*facts.eos_token_ids, *ids, *abilities.stop_tokens(texts)]
    return {"stop_token_ids": ids, "stop": texts}


def _template_variables(request: ChatCompletionRequest, abilities: ChatAbilities) -> dict[str, Any]:
    """Return the field with the variables that the template may read; {} when there are none."""
    given = request.chat_template_kwargs or {}
    variables = {**abilities.variables_of(request.reasoning_effort), **abilities.read(given)}
    return {"chat_template_kwargs": variables} if variables else {}


def _tools(request: ChatCompletionRequest, abilities: ChatAbilities) -> dict[str, Any]:
    """Return the fields of tools; {} if there are none. FieldError: this server cannot use them."""
    called = any(message.tool_calls for message in request.messages)
    results = any(message.role == "tool" for message in request.messages)
    abilities.require_calls(bool(request.tools), called, results)
    fields = {"tools", "tool_choice", "parallel_tool_calls"}
    return request.model_dump(include=fields, exclude_none=True) if request.tools else {}


def _max_tokens(request: OpenAIRequest, prompt_tokens: int, facts: BaseModelFacts) -> int:
    limit, context = request.max_tokens, facts.context_length
    if isinstance(request, ChatCompletionRequest):
        limit = request.max_completion_tokens if limit is None else limit
        limit = max(1, context - prompt_tokens) if limit is None else limit
    elif limit is None:
        limit = COMPLETION_MAX_TOKENS
    if prompt_tokens + limit > context:
        field = "messages" if isinstance(request, ChatCompletionRequest) else "prompt"
        told = overflow(prompt_tokens, limit, context, facts.name)
        raise FieldError(told, field, "context_length_exceeded")
    return limit

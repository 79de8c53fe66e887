"""Abilities in which sampling engines differ. Abilities that a base model's one lacks are refused by name."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from skyrl_tinker.errors import NotSupportedError


def _ability(about: str) -> Any:
    return field(default=True, metadata={"about": about})


@dataclass(frozen=True, slots=True)
class SamplerAbilities:
    """Sampling engine by the fields of requests, and the settings, that it serves.

    `lowest_temperature`: above 0. `most_stop_strings`: None where it has no bound. `most_target_scores`:
    likewise, of `target_prompt_logprobs`: positions, also sampled ones, by tokens that are a target at any.
    `fewest_tokens`: of a completion; 0 where a prompt can be echoed alone.
    """

    engine: str = ""
    lowest_temperature: float = 0.0
    most_stop_strings: int | None = None
    most_target_scores: int | None = None
    fewest_tokens: int = 0
    seed: bool = _ability("`seed`: the same sample again")
    prompt_alt_tokens_k: bool = _ability("`prompt_alt_tokens_k`: draws at each position of the prompt")
    router_replay: bool = _ability("`router_replay`: the experts of each sampled token")
    add_special_tokens: bool = _ability("`add_special_tokens: false` in completions")
    response_format: bool = _ability("`response_format` of chats: JSON, or JSON that fits a schema")
    streamed_chat_logprobs: bool = _ability("`logprobs` of chats that are streamed")
    reasoning_parser: bool = _ability("`reasoning_parser`: reasoning of chat answers in a field of its own")
    tool_parser: bool = _ability("`tool_parser`: tools in chats")
    strict_tools: bool = _ability("`strict: true` of tools: arguments that fit their schema")
    parallel_tool_calls: bool = _ability("`parallel_tool_calls: false`: one call at most")
    processed_logprobs: bool = _ability('`sampled_logprobs = "processed"`')
    prefill_urls: bool = _ability("`prefill_urls` and `decode_urls`: prompts computed apart")
    router_url: bool = _ability("`router_url`: a router of your own before servers by URL")
    colocated: bool = _ability('`placement = "colocated"`: turns with the trainer on the same GPUs')
    ray_address: bool = _ability("`ray_address`: replicas on other hosts")

    def __str__(self) -> str:
        lacking = [each.name for each in fields(self) if getattr(self, each.name) is False]
        return f"{self.engine} without {', '.join(lacking)}" if lacking else self.engine

    def require(self, asked: Iterable[str]) -> None:
        """Raise NotSupportedError that names the first field that it does not serve."""
        for name in asked:
            if not getattr(self, name):
                text = "is not supported by this base model's sampling engine"
                raise NotSupportedError(f"{name} {text}, {self.engine}")

    def refusal(
        self, temperature: float, stops: Sequence[str | int], max_tokens: int | None = None
    ) -> str | None:
        """Return the fault of the first parameter that is out of range, None without one."""
        if 0 < temperature < self.lowest_temperature:
            least = self.lowest_temperature
            return f"temperature: expected 0 (greedy) or at least {least}, found {temperature}"
        here = f"for this base model's sampling engine, {self.engine}"
        strings = sum(isinstance(each, str) for each in stops)
        if self.most_stop_strings is not None and strings > self.most_stop_strings:
            return f"stop: found {strings} strings, expected at most {self.most_stop_strings} {here}"
        if max_tokens is not None and max_tokens < self.fewest_tokens:
            return f"max_tokens: found {max_tokens}, expected at least {self.fewest_tokens} {here}"
        return None


ALL_ABILITIES = SamplerAbilities()

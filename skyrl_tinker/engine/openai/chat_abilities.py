"""Abilities of the served model on the OpenAI routes: template, special tokens, tools, separate reasoning."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from skyrl_tinker.protocol.schemas.openai import FieldError


@dataclass(frozen=True, slots=True)
class ChatAbilities:
    """`words`: all words of the template's text, hence a superset of the variables that it reads.

    `special_tokens`: text -> id; answers do not show these texts.
    """

    words: frozenset[str]
    reasoning_parser: str | None = None
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    tool_parser: str | None = None

    def read(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the variables that the template may read: no other changes its output."""
        return {name: value for name, value in given.items() if name in self.words}

    def variables_of(self, effort: str | None) -> dict[str, Any]:
        """Translate `reasoning_effort`, as samplers do: a template without levels can only switch thinking.

        Raises FieldError if the template can do neither.
        """
        if effort is None:
            return {}
        known = self.read({"reasoning_effort": effort, "enable_thinking": effort != "none"})
        if not known and (effort != "none" or "think" in self.words):
            raise FieldError(
                f"reasoning_effort: {effort} is not supported by this model: its chat template reads neither "
                "reasoning_effort nor enable_thinking",
                "reasoning_effort",
            )
        return known

    def stop_tokens(self, texts: Sequence[str]) -> list[int]:
        """Return the ids of stops that are special tokens: samplers search texts in the shown answer only.

        Raises FieldError for a longer text that contains such a token: it never occurs in a shown answer.
        """
        ids = []
        for text in texts:
            hidden = next((token for token in self.special_tokens if token in text), None)
            if text in self.special_tokens:
                ids.append(self.special_tokens[text])
            elif hidden is not None:
                raise FieldError(
                    f"stop: {text!r} has the special token {hidden}, which is not in the text of answers: "
                    "expected that token alone, or a text without it",
                    "stop",
                )
        return ids

    def require_separation(self, separate: bool | None) -> None:
        """Raise FieldError if `separate_reasoning` requests another form than this server's."""
        if separate is None or separate == bool(self.reasoning_parser):
            return
        asked, found = ("true", "not set") if separate else ("false", self.reasoning_parser)
        raise FieldError(
            f"separate_reasoning: {asked} is not supported by this server: its reasoning_parser is {found}",
            "separate_reasoning",
        )

    def require_calls(self, tools: bool, calls: bool, results: bool) -> None:
        """Raise FieldError for tool fields that the template ignores, or calls that would stay text."""
        if tools and not self.tool_parser:
            raise FieldError(
                "tools: not supported by this server: its tool_parser is not set, expected the parser of its "
                "sampler for this model, as hermes",
                "tools",
            )
        shown = (tools, "tools", "tools"), (calls, "tool_calls", "messages"), (results, "tool", "messages")
        for given, word, field_ in shown:
            if given and word not in self.words:
                raise FieldError(f"{field_}: the chat template of this model does not show {word}", field_)


def chat_abilities(directory: Path, reasoning_parser: str | None, tool_parser: str | None) -> ChatAbilities:
    """Read the template of the model in `directory`."""
    words = frozenset(re.findall(r"\w+", _template(directory)))
    return ChatAbilities(words, reasoning_parser, _special_tokens(directory), tool_parser)


def _special_tokens(directory: Path) -> dict[str, int]:
    """Read the special tokens of a fast tokenizer's file, else of the slow one's configuration."""
    file, config = directory / "tokenizer.json", directory / "tokenizer_config.json"
    if file.is_file():
        added = orjson.loads(file.read_bytes()).get("added_tokens", [])
    else:
        slow = orjson.loads(config.read_bytes()).get("added_tokens_decoder", {}) if config.is_file() else {}
        added = [token | {"id": int(number)} for number, token in slow.items()]
    return {token["content"]: token["id"] for token in added if token.get("special") and token["content"]}


def _template(directory: Path) -> str:
    """Return the text of all templates: from a separate file, which takes precedence, or the tokenizer's."""
    file, config = directory / "chat_template.jinja", directory / "tokenizer_config.json"
    if file.is_file():
        return file.read_text()
    found = orjson.loads(config.read_bytes()).get("chat_template") if config.is_file() else None
    named = found if isinstance(found, list) else [{"template": found or ""}]
    return "\n".join(each["template"] for each in named)

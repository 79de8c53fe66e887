"""Abilities of the served model on the OpenAI routes: template, special tokens, tools, separate reasoning."""

import re
from collections.abc import Iterator, Mapping, Sequence
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
    """Read the special tokens of a fast tokenizer's file, and those that its configuration makes special."""
    fast, config = _json(directory / "tokenizer.json"), _json(directory / "tokenizer_config.json")
    decoder = config.get("added_tokens_decoder", {}).items()
    added = [*fast.get("added_tokens", ()), *(token | {"id": int(number)} for number, token in decoder)]
    special = {token["content"] for token in added if token.get("special")}
    special |= {*_named(config), *_named(_json(directory / "special_tokens_map.json"))}
    vocabulary = fast.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):  # of pairs: a token and its score
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    ids = vocabulary | {token["content"]: token["id"] for token in added}
    return {text: ids[text] for text in special if text and text in ids}


def _named(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tokens that a tokenizer's configuration names by their roles."""
    for name, value in config.items():
        if name.endswith(("_token", "special_tokens")):
            yield from _texts(value)


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of a token, which may be one with flags, or of several in a list or by their names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        several = value if isinstance(value, list) else [value.get("content", list(value.values()))]
        for each in several:
            yield from _texts(each)


def _json(file: Path) -> dict[str, Any]:
    """Return the object in a file, an empty one if there is no file."""
    content: dict[str, Any] = orjson.loads(file.read_bytes()) if file.is_file() else {}
    return content


def _template(directory: Path) -> str:
    """Return the text of all templates: from a separate file, which takes precedence, or the tokenizer's."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    found = _json(directory / "tokenizer_config.json").get("chat_template")
    named = found if isinstance(found, list) else [{"template": found or ""}]
    return "\n".join(each["template"] for each in named)

"""Abilities of the served model in chats: what its chat template reads, whether reasoning is separated."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_tinker.protocol.schemas.openai import FieldError


@dataclass(frozen=True, slots=True)
class ChatAbilities:
    """`words`: all words of the template's text, so a superset of the variables that it reads."""

    words: frozenset[str]
    reasoning_parser: str | None = None

    def read(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the variables that the template may read: no other can change what it writes."""
        return {name: value for name, value in given.items() if name in self.words}

    def variables_of(self, effort: str | None) -> dict[str, Any]:
        """Translate `reasoning_effort`, as vLLM does: a template without degrees can switch thinking only.

        Raises FieldError where the template can do neither.
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

    def require_separation(self, separate: bool | None) -> None:
        """Raise FieldError when `separate_reasoning` asks for another form than this server's."""
        if separate is None or separate == bool(self.reasoning_parser):
            return
        asked, found = ("true", "not set") if separate else ("false", self.reasoning_parser)
        raise FieldError(
            f"separate_reasoning: {asked} is not supported by this server: its reasoning_parser is {found}",
            "separate_reasoning",
        )


def chat_abilities(directory: Path, reasoning_parser: str | None) -> ChatAbilities:
    """Read the template of the model in `directory`."""
    return ChatAbilities(frozenset(re.findall(r"\w+", _template(directory))), reasoning_parser)


def _template(directory: Path) -> str:
    """Return the text of all templates: in a file of its own, which goes first, or with the tokenizer."""
    file, config = directory / "chat_template.jinja", directory / "tokenizer_config.json"
    if file.is_file():
        return file.read_text()
    found = json.loads(config.read_text()).get("chat_template") if config.is_file() else None
    named = found if isinstance(found, list) else [{"template": found or ""}]
    return "\n".join(each["template"] for each in named)

"""Tokens as text, by the base model's own tokenizer."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_tinker.errors import NotFoundError

if TYPE_CHECKING:  # few requests need its import, which takes time at each start
    from tokenizers import Tokenizer

FILE = "tokenizer.json"


class TokenTexts:
    """Decoder that reads the tokenizer when it is first used; call it in a thread."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / FILE

    def split(self, tokens: Sequence[int]) -> list[str]:
        """Return the text that each token adds; of a character in several tokens, the last one has it.

        Raises NotFoundError for a model without a fast tokenizer.
        """
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(self._tokenizer, token) or "" for token in tokens]

    @cached_property
    def _tokenizer(self) -> "Tokenizer":
        from tokenizers import Tokenizer

        if not self._file.is_file():
            raise NotFoundError(f"the base model has no {FILE}, so its tokens cannot be shown as text")
        return Tokenizer.from_file(str(self._file))

"""Tokens as text, by a base model's own tokenizer."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_tinker.errors import NotFoundError

if TYPE_CHECKING:  # few requests need its import, which takes time at each start
    from tokenizers import Tokenizer

FILE = "tokenizer.json"


def split_tokens(tokens: Sequence[int], directory: Path) -> list[str]:
    """Return the text that each token adds; of a character in several tokens, the last one has it.

    Call it in a thread: it reads the tokenizer of the model in `directory` when it first needs it. Raises
    NotFoundError for a model without a fast tokenizer.
    """
    from tokenizers.decoders import DecodeStream

    stream, tokenizer = DecodeStream(skip_special_tokens=False), _tokenizer(directory / FILE)
    return [stream.step(tokenizer, token) or "" for token in tokens]


@cache
def _tokenizer(file: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    if not file.is_file():
        raise NotFoundError(f"the base model has no {FILE}, so its tokens cannot be shown as text")
    return Tokenizer.from_file(str(file))

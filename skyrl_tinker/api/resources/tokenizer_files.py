"""The base model's tokenizer as a tar, for clients that cannot read its directory."""

import io
import tarfile
from functools import cache
from pathlib import Path

from skyrl_tinker.errors import NotFoundError

TOKENIZER_FILES = (
    "config.json",  # transformers finds the tokenizer's class by it
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


@cache
def tokenizer_tar(directory: Path) -> bytes:
    """Return a tar of those files that the model has, a few MB, which all answers share.

    Raises NotFoundError if it has no tokenizer.
    """
    files = [file for name in TOKENIZER_FILES if (file := directory / name).is_file()]
    if not any(file.name.startswith(("tokenizer", "vocab")) for file in files):
        raise NotFoundError("the base model has no tokenizer")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for file in files:
            tar.addfile(_member(file), io.BytesIO(file.read_bytes()))
    return buffer.getvalue()


def _member(file: Path) -> tarfile.TarInfo:
    """Return a header without the owner and the mode of the server's file."""
    member = tarfile.TarInfo(file.name)
    status = file.stat()
    member.size, member.mtime = status.st_size, int(status.st_mtime)
    return member

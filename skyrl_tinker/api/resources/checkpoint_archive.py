"""A LoRA checkpoint as one tar, made while it is sent: what `tinker checkpoint download` of SDKs up to 0.35
unpacks."""

import json
import tarfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import anyio

from skyrl_tinker.domain.ids import CheckpointKind
from skyrl_tinker.domain.peft_config import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from skyrl_tinker.errors import NotFoundError, UserError
from skyrl_tinker.store.checkpoint_records import CheckpointRow

COMPLETE_FILE = "checkpoint_complete"
"""`tinker checkpoint push-hf` of those SDKs refuses an archive without it."""
_CHUNK = 1 << 20
_END = bytes(2 * tarfile.BLOCKSIZE)


@dataclass(frozen=True, slots=True)
class Archive:
    """`weights` has `weights_size` bytes and comes last; `texts` are small files by name."""

    texts: Mapping[str, bytes]
    weights: Path
    weights_size: int
    time: float

    @property
    def size(self) -> int:
        """Of the tar, in bytes."""
        sizes = [*map(len, self.texts.values()), self.weights_size]
        return sum(tarfile.BLOCKSIZE + size + len(_padding(size)) for size in sizes) + len(_END)

    async def stream(self) -> AsyncIterator[bytes]:
        for name, text in self.texts.items():
            yield self._header(name, len(text)) + text + _padding(len(text))
        yield self._header(self.weights.name, self.weights_size)
        async with await anyio.open_file(self.weights, "rb") as file:
            while chunk := await file.read(_CHUNK):
                yield chunk
        yield _padding(self.weights_size) + _END

    def _header(self, name: str, size: int) -> bytes:
        member = tarfile.TarInfo(name)
        member.size, member.mtime = size, int(self.time)
        return member.tobuf(tarfile.GNU_FORMAT)


def require_archivable(row: CheckpointRow) -> None:
    """Raises UserError that says what to do instead."""
    if row.kind is CheckpointKind.EXTERNAL_WEIGHTS:
        raise UserError(f"{row.path} has no archive: its files have URLs (external_weights_urls)")
    if row.spec.rank == 0:
        raise UserError(
            f"{row.path} has all parameters, expected a LoRA adapter: archives hold nothing else; "
            "export it with save_weights_external (SDK 0.28 and newer)"
        )


async def archive_of(row: CheckpointRow) -> Archive:
    """Raises NotFoundError when the files were removed a moment ago."""
    directory = anyio.Path(row.directory)
    try:
        config = json.loads(await (directory / ADAPTER_CONFIG_FILE).read_text())
        size = (await (directory / ADAPTER_FILE).stat()).st_size
    except FileNotFoundError:
        raise NotFoundError(f"no checkpoint {row.path}: its files are gone") from None
    config["base_model_name_or_path"] = row.base_model  # the file has a directory of this server's
    texts = {ADAPTER_CONFIG_FILE: json.dumps(config, indent=2).encode(), COMPLETE_FILE: b""}
    return Archive(texts, Path(row.directory) / ADAPTER_FILE, size, row.created_at)


def _padding(size: int) -> bytes:
    return bytes(-size % tarfile.BLOCKSIZE)

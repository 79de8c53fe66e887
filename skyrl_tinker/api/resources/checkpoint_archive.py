"""LoRA checkpoint as a tar, built while it is sent, for `tinker checkpoint download` of SDKs up to 0.35."""

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
"""Marker without which `tinker checkpoint push-hf` of those SDKs refuses an archive."""
_CHUNK = 1 << 20
_END = bytes(2 * tarfile.BLOCKSIZE)


@dataclass(frozen=True, slots=True)
class Archive:
    """Contents of a tar: `texts`, small files by name, then `weights` of `weights_size` bytes."""

    texts: Mapping[str, bytes]
    weights: Path
    weights_size: int
    time: float

    @property
    def size(self) -> int:
        """Size of the tar in bytes."""
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
    """Raise UserError, which names the alternative, unless the checkpoint is a LoRA adapter."""
    if row.kind is CheckpointKind.EXTERNAL_WEIGHTS:
        raise UserError(f"{row.path} has no archive: its files have URLs (external_weights_urls)")
    if row.spec.rank == 0:
        raise UserError(
            f"{row.path} holds all parameters, expected a LoRA adapter: "
            "export it with save_weights_external (SDK 0.28 and newer)"
        )


async def archive_of(row: CheckpointRow) -> Archive:
    """Return the archive of a LoRA checkpoint. NotFoundError if its files were just removed."""
    directory = anyio.Path(row.directory)
    try:
        config = json.loads(await (directory / ADAPTER_CONFIG_FILE).read_text())
        size = (await (directory / ADAPTER_FILE).stat()).st_size
    except FileNotFoundError:
        raise NotFoundError(f"no checkpoint {row.path}: its files are gone") from None
    config["base_model_name_or_path"] = row.base_model  # the file names a local directory
    texts = {ADAPTER_CONFIG_FILE: json.dumps(config, indent=2).encode(), COMPLETE_FILE: b""}
    return Archive(texts, Path(row.directory) / ADAPTER_FILE, size, row.created_at)


def _padding(size: int) -> bytes:
    return bytes(-size % tarfile.BLOCKSIZE)

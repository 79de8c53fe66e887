"""LoRA checkpoint as a tar, built while it is sent, for `tinker checkpoint download` of SDKs up to 0.35."""

import json
import tarfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

from skyrl_tinker.api.resources.checkpoint_files import CheckpointFiles
from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.ids import CheckpointKind
from skyrl_tinker.domain.peft_config import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    MERGING_FILE,
    MERGING_NOTE,
    merges_wrongly,
)
from skyrl_tinker.errors import UserError
from skyrl_tinker.storage.storage_port import Storage
from skyrl_tinker.store.checkpoint_records import CheckpointRow
from skyrl_tinker.system.off_loop import in_transfer_thread

COMPLETE_FILE = "checkpoint_complete"
"""Marker without which `tinker checkpoint push-hf` of those SDKs refuses an archive."""
_CHUNK = 1 << 20
_END = bytes(2 * tarfile.BLOCKSIZE)


@dataclass(frozen=True, slots=True)
class Archive:
    """Contents of a tar: `texts`, small files by name, then `weights`, an open file of that size in bytes."""

    texts: Mapping[str, bytes]
    weights: BinaryIO
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
        yield self._header(ADAPTER_FILE, self.weights_size)
        with self.weights as file:
            while chunk := await in_transfer_thread(file.read, _CHUNK):
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


async def archive_of(storage: Storage, row: CheckpointRow, bases: Bases) -> Archive:
    """Return the archive of a LoRA checkpoint. NotFoundError if its files were just removed.

    `bases`: those that are served, of which the checkpoint's may be none.
    """
    files = CheckpointFiles(storage, row)
    size = (await files.manifest()).files[ADAPTER_FILE].size
    config = json.loads(await files.read(ADAPTER_CONFIG_FILE))
    config["base_model_name_or_path"] = row.base_model  # the file names a local directory
    texts = {ADAPTER_CONFIG_FILE: json.dumps(config, indent=2).encode(), COMPLETE_FILE: b""}
    if (facts := bases.find(row.base_model)) and merges_wrongly(row.spec, facts):
        texts[MERGING_FILE] = MERGING_NOTE.encode()
    return Archive(texts, await files.open(ADAPTER_FILE), size, row.created_at)


def _padding(size: int) -> bytes:
    return bytes(-size % tarfile.BLOCKSIZE)

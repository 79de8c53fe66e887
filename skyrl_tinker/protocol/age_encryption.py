"""Encryption of files with age (https://age-encryption.org/v1), and checks of its recipients."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from skyrl_tinker.errors import UserError

SUFFIX = ".age"
PARTIAL = ".age.tmp"
"""Name of a file that is being encrypted, which a later try replaces."""
FIELD = "age_encryption_recipients"
MAX_RECIPIENTS = 100
_EXPECTED = "an age public key ('age1...') or an SSH public key ('ssh-ed25519 ...', 'ssh-rsa ...')"


def check_recipients(recipients: Sequence[str]) -> None:
    """Raise UserError naming the first text that is not a recipient."""
    if not 1 <= len(recipients) <= MAX_RECIPIENTS:
        raise UserError(
            f"{FIELD} has {len(recipients)} entries, expected 1 to {MAX_RECIPIENTS}, "
            "or no such field for unencrypted files"
        )
    for index, text in enumerate(recipients):
        _recipient(f"{FIELD}[{index}]", text)


def encrypt(file: Path, recipients: Sequence[str]) -> Path:
    """Replace a file by `<file>.age`, which any of the checked recipients can read. Streamed.

    Raises OSError.
    """
    pyrage = _pyrage()
    encrypted, partial = file.with_name(file.name + SUFFIX), file.with_name(PARTIAL)
    readers = [_recipient(FIELD, text) for text in recipients]
    try:
        with file.open("rb") as plain, partial.open("wb") as out:
            written = _Written(out)
            try:  # not encrypt_file, which holds the GIL until it ends
                pyrage.encrypt_io(plain, written, readers)
            except pyrage.EncryptError as error:  # the recipients are valid, so the disk failed
                raise written.error or OSError(f"{file.name} could not be encrypted: {error}") from error
            if written.error is not None:  # of the last write
                raise written.error
            out.flush()
            os.fsync(out.fileno())  # the plain file goes
        partial.rename(encrypted)
    except OSError:
        partial.unlink(missing_ok=True)  # a full disk does not stay so until the next try
        raise
    file.unlink()
    return encrypted


class _Written:
    """File that keeps the error of a write: pyrage tells only its text, and nothing of the last one."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._out.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        try:
            self._out.flush()
        except OSError as error:
            self.error = error
            raise


def _recipient(field: str, text: str) -> Any:
    pyrage = _pyrage()
    kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
    try:
        return kind.Recipient.from_str(text)
    except pyrage.RecipientError as error:
        raise UserError(f"{field} is {_shown(text)}, expected {_EXPECTED}: {error}") from None


def _pyrage() -> Any:
    """Import pyrage only where encryption is requested."""
    import pyrage  # type: ignore[import-untyped]

    return pyrage


def _shown(text: str) -> str:
    """Quote a text, shortened. Hide a secret key given by mistake: it must not end in a log."""
    if text.upper().startswith("AGE-SECRET-KEY") or "PRIVATE KEY" in text:
        return "a secret key"
    return repr(text if len(text) <= 80 else f"{text[:77]}...")

"""Decompression of request bodies, up to a cap."""

import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import zstandard

from skyrl_tinker.domain.units import MiB
from skyrl_tinker.errors import TooLargeError, UserError

MAX_ZSTD_WINDOW = 1 << 27
"""Window limit of the zstd programs; a frame may ask for 2 GiB."""
_SMALLEST_SLICE = 64
_PIECE = 4 * MiB


class _Stream(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class _Codec:
    name: str
    open: Callable[[], _Stream]
    whole: Callable[[bytes, int], bytes]  # of a body and its expanded size: without a copy
    max_expansion: int  # bytes out per byte in


def _zstd() -> zstandard.ZstdDecompressor:
    return zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW)


_CODECS = {
    "zstd": _Codec(
        "zstd",
        lambda: _zstd().decompressobj(),
        lambda body, size: _zstd().decompress(body, max_output_size=max(1, size), allow_extra_data=False),
        32768,  # a block of 4 bytes can encode 128 KiB of one byte
    ),
    "gzip": _Codec(
        "gzip",
        lambda: zlib.decompressobj(wbits=31),
        lambda body, size: zlib.decompress(body, wbits=31, bufsize=max(1, size)),
        1032,
    ),
}


def require_known(encoding: str) -> None:
    """Raise UserError for an unknown encoding."""
    _codec(encoding)


def _codec(encoding: str) -> _Codec:
    codec = _CODECS.get(encoding)
    if codec is None:
        raise UserError(f"Content-Encoding: found {encoding!r}, expected zstd, gzip or identity")
    return codec


def decompress(body: bytes, encoding: str, cap: int) -> bytes:
    """Return the decompressed body. TooLargeError if it has more than `cap` bytes, UserError if corrupt.

    A body that does not say its size is decompressed twice, first to count: no bomb takes memory.
    """
    codec = _codec(encoding)
    size = _announced_size(body, codec)
    if size is None:
        size = 0
        for piece in _expand(body, codec, cap):
            size += len(piece)
            if size > cap:
                break
    if size > cap:
        raise TooLargeError(
            f"request body: {len(body)} bytes of {encoding} expand to more than {cap} bytes, the cap"
        )
    try:
        return codec.whole(body, size)
    except (zstandard.ZstdError, zlib.error) as error:
        raise UserError(f"request body: expected exactly one complete {encoding} frame: {error}") from error


def first_bytes(body: bytes, encoding: str) -> bytes:
    """Return the expanded beginning of a possibly truncated body; empty if it cannot be decompressed."""
    with suppress(UserError):
        for piece in _expand(body, _codec(encoding), len(body)):
            if piece:
                return piece
    return b""


def most_expanded(body: bytes, encoding: str) -> int:
    """Return an upper bound of the expanded size in bytes. UserError for an unknown encoding."""
    codec = _codec(encoding)
    size = _announced_size(body, codec)
    return len(body) * codec.max_expansion if size is None else size


def _announced_size(body: bytes, codec: _Codec) -> int | None:
    """Return the expanded size that the body states; None if it states none."""
    if codec.name != "zstd":
        return None
    try:
        size = zstandard.frame_content_size(body)
    except zstandard.ZstdError:
        return None
    return size if size >= 0 else None


def _expand(body: bytes, codec: _Codec, cap: int) -> Iterator[bytes]:
    """Yield expanded pieces, from slices so small that few expand beyond _PIECE or the rest of `cap`."""
    stream = codec.open()
    start = 0
    left = cap
    while start < len(body) and not stream.eof:
        end = start + max(_SMALLEST_SLICE, min(left, _PIECE) // codec.max_expansion)
        try:
            piece = stream.decompress(body[start:end])
        except (zstandard.ZstdError, zlib.error) as error:
            raise UserError(f"request body: not valid {codec.name}: {error}") from error
        start = end
        left = max(0, left - len(piece))
        yield piece
    if not stream.eof or stream.unused_data or start < len(body):
        raise UserError(f"request body: expected exactly one complete {codec.name} frame")

"""Decompression of request bodies, up to a cap."""

import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import zstandard

from skyrl_tinker.errors import TooLargeError, UserError

MAX_ZSTD_WINDOW = 1 << 27
"""Window limit of the zstd programs; a frame may ask for 2 GiB."""
_SMALLEST_SLICE = 64


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
    max_expansion: int  # bytes out per byte in


_CODECS = {
    # a block of 4 bytes can encode 128 KiB of one byte
    "zstd": _Codec(
        "zstd", lambda: zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW).decompressobj(), 32768
    ),
    "gzip": _Codec("gzip", lambda: zlib.decompressobj(wbits=31), 1032),
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
    """Return the decompressed body. TooLargeError once it passes `cap` bytes, UserError if it is corrupt."""
    out = io.BytesIO()
    for piece in _expand(body, _codec(encoding), cap):
        if out.tell() + len(piece) > cap:
            raise TooLargeError(
                f"request body: {len(body)} bytes of {encoding} expand to more than {cap} bytes, the cap"
            )
        out.write(piece)
    return out.getvalue()


def first_bytes(body: bytes, encoding: str) -> bytes:
    """Return the expanded beginning of a possibly truncated body; empty if it cannot be decompressed."""
    with suppress(UserError):
        for piece in _expand(body, _codec(encoding), len(body)):
            if piece:
                return piece
    return b""


def most_expanded(body: bytes, encoding: str) -> int:
    """Return an upper bound of the expanded size in bytes. UserError for an unknown encoding."""
    if encoding == "zstd":
        with suppress(zstandard.ZstdError):
            content_size = zstandard.frame_content_size(body)
            if content_size >= 0:
                return content_size
    return len(body) * _codec(encoding).max_expansion


def _expand(body: bytes, codec: _Codec, cap: int) -> Iterator[bytes]:
    """Yield expanded pieces, from slices so small that none expands far beyond what is left of `cap`."""
    stream = codec.open()
    start = 0
    left = cap
    while start < len(body) and not stream.eof:
        end = start + max(_SMALLEST_SLICE, left // codec.max_expansion)
        try:
            piece = stream.decompress(body[start:end])
        except (zstandard.ZstdError, zlib.error) as error:
            raise UserError(f"request body: not valid {codec.name}: {error}") from error
        start = end
        left = max(0, left - len(piece))
        yield piece
    if not stream.eof or stream.unused_data or start < len(body):
        raise UserError(f"request body: expected exactly one complete {codec.name} frame")

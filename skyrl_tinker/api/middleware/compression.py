"""Compressed request bodies, expanded up to a cap."""

import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import zstandard

from skyrl_tinker.errors import TooLargeError, UserError

MAX_ZSTD_WINDOW = 1 << 27
"""What zstd's own programs take; a frame may ask for 2 GiB."""
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
    # a block of 4 bytes can say "128 KiB of the same byte"
    "zstd": _Codec(
        "zstd", lambda: zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW).decompressobj(), 32768
    ),
    "gzip": _Codec("gzip", lambda: zlib.decompressobj(wbits=31), 1032),
}


def require_known(encoding: str) -> None:
    """Raises UserError."""
    _codec(encoding)


def _codec(encoding: str) -> "_Codec":
    codec = _CODECS.get(encoding)
    if codec is None:
        raise UserError(f"Content-Encoding: found {encoding!r}, expected zstd, gzip or identity")
    return codec


def decompress(body: bytes, encoding: str, cap: int) -> bytes:
    """The decompressed body. TooLargeError once it passes `cap` bytes, UserError when it is not intact."""
    out = io.BytesIO()
    for piece in _expand(body, _codec(encoding), cap):
        if out.tell() + len(piece) > cap:
            raise TooLargeError(
                f"request body: {len(body)} bytes of {encoding} expand to more than {cap} bytes, the cap"
            )
        out.write(piece)
    return out.getvalue()


def first_bytes(body: bytes, encoding: str) -> bytes:
    """What the beginning of a body that may be cut off expands to; empty when nothing can be told."""
    with suppress(UserError):
        for piece in _expand(body, _codec(encoding), len(body)):
            if piece:
                return piece
    return b""


def most_expanded(body: bytes, encoding: str) -> int:
    """How many bytes it can become. UserError for an encoding that is not known."""
    if encoding == "zstd":
        with suppress(zstandard.ZstdError):
            known = zstandard.frame_content_size(body)
            if known >= 0:
                return known
    return len(body) * _codec(encoding).max_expansion


def _expand(body: bytes, codec: _Codec, cap: int) -> Iterator[bytes]:
    """Feeds slices so small that none of them can expand far beyond what is left of the cap."""
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

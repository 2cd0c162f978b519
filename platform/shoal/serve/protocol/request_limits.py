"""The limits of a request's head and body. Called by both protocols and by the server of an exported folder. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.errors import InferenceError

# zlib's window sizes; see the manual of deflateInit2.
WINDOW_BITS = {b"gzip": 31, b"deflate": 15}


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """An endpoint's limits.

    max_body_bytes:       of a request's body, as sent and when decompressed (413)
    max_headers, max_header_bytes: the number of headers, and the bytes of names and values (431)
    max_path_chars:       of the path (414)
    body_grace_s, min_body_bytes_per_s: a body must arrive within `body_grace_s` after the head, and one second more for
                          each `min_body_bytes_per_s` of it (408)
    answer_grace_s:       a client that reads none of a stream's answers for so long counts as disconnected
    """

    max_body_bytes: int = 16 * 1024 * 1024
    max_headers: int = 64
    max_header_bytes: int = 8192
    max_path_chars: int = 1024
    body_grace_s: float = 10.0
    min_body_bytes_per_s: int = 32 * 1024
    answer_grace_s: float = 60.0

    def check_head(self, path: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Check a request's head. Raises InferenceError (400, 414, 431)."""
        if len(path) > self.max_path_chars:
            raise InferenceError(414, f"the path has {len(path)} characters, the limit is {self.max_path_chars}")
        if len(headers) > self.max_headers:
            raise InferenceError(431, f"the request has {len(headers)} headers, the limit is {self.max_headers}")
        size_bytes = 0
        for name, value in headers:
            size_bytes += len(name) + len(value)
        if size_bytes > self.max_header_bytes:
            raise InferenceError(431, f"the headers have {size_bytes} bytes, the limit is {self.max_header_bytes}")
        names = [name for name, _ in headers]
        if max(names.count(b"authorization"), names.count(b"x-api-key")) > 1:
            # What is before this endpoint may have checked another.
            raise InferenceError(400, "several keys: send one header authorization, or x-api-key")

    def body_deadline_s(self, received_bytes: int) -> float:
        """How long after its head a body may still be incomplete, when so much of it has arrived."""
        return self.body_grace_s + received_bytes / self.min_body_bytes_per_s

    def build_slow_body_error(self, received_bytes: int) -> InferenceError:
        """The error of a body that is not complete by `body_deadline_s`."""
        pace = f"{self.body_grace_s:g} s, and one second for each {self.min_body_bytes_per_s} bytes"
        return InferenceError(408, f"the body is too slow: {received_bytes} bytes have arrived; it may take {pace}")

    def decompress(self, body: bytes, encoding: bytes) -> bytes:
        """Decompress a body sent with `Content-Encoding: gzip` or `deflate`, to at most `max_body_bytes`.

        Raises InferenceError: 415 for another encoding, 413 when too large, 400 when damaged or incomplete.
        """
        window_bits, name = WINDOW_BITS.get(encoding.strip().lower()), encoding.decode("latin-1")
        if window_bits is None:
            raise InferenceError(
                415, f"Content-Encoding {name[:40]!r} is not supported; gzip, deflate and identity are"
            )
        decompressor = zlib.decompressobj(window_bits)
        try:
            plain = decompressor.decompress(body, self.max_body_bytes + 1)
        except zlib.error as error:
            raise InferenceError(400, f"the body is not {name}: {error}") from None
        if len(plain) > self.max_body_bytes:
            raise InferenceError(413, f"the body is larger than the limit of {self.max_body_bytes} bytes")
        if not decompressor.eof:
            raise InferenceError(400, f"the body ends before its {name} does")
        if decompressor.unused_data:
            behind = len(decompressor.unused_data)
            raise InferenceError(400, f"there are {behind} bytes after the end of the {name}")
        return plain


def read_length(headers: Mapping[bytes, bytes], name: bytes) -> int | None:
    """The value of a header that is a length in bytes; None without it. Raises InferenceError (400)."""
    value = headers.get(name)
    if value is None:
        return None
    if not value.isdigit() or len(value) > 18:
        shown = value[:40].decode("latin-1")
        raise InferenceError(400, f"{name.decode().title()} = {shown!r}: expected a number of bytes")
    return int(value)

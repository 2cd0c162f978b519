"""A call's options other than its tensors: the version, the side of a canary, the deadline.

Called by the REST application and the gRPC service with headers or metadata, and the protocol's parameters. Pure.
Errors are InferenceErrors: 400 for an invalid value, 404 for an unknown version.
"""

from __future__ import annotations

from urllib.parse import unquote_to_bytes

from shoal.errors import InferenceError
from shoal.serve.messages.inference import ServedModelProtocol, unknown_version

TRACKS = ("", "stable", "candidate")
MAX_DEADLINE_MS = 1e12
MAX_STICKY_CHARS = 256


def resolve_version(model: ServedModelProtocol, text: str | None) -> int | None:
    """The requested version; None, without a text, leaves the choice to the server. Raises InferenceError (404)."""
    if not text:
        return None
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 19 else -1
    if number not in model.versions:
        raise unknown_version(model.name, text, model.versions)
    return number


def parse_track(text: str) -> str:
    """The side of a canary; "" leaves it to the rollout. Raises InferenceError (400)."""
    if text not in TRACKS:
        raise InferenceError(400, f"shoal-track = {text[:40]!r}: expected stable or candidate")
    return text


def parse_sticky(text: str) -> str:
    """The key whose calls stay on one side of a canary; "" draws for each. Raises InferenceError (400).

    text: a header's value, UTF-8 that may be percent-encoded
    """
    if "%" in text or not text.isascii():
        text = unquote_to_bytes(text.encode("latin-1")).decode(errors="backslashreplace")
    if len(text) > MAX_STICKY_CHARS:
        raise InferenceError(400, f"shoal-sticky has {len(text)} characters, the limit is {MAX_STICKY_CHARS}")
    return text


def compute_deadline(now_s: float, timeout_us: object, deadline_ms: str, default_s: float | None) -> float | None:
    """The time at which the request expires; None for never. Raises InferenceError (400).

    timeout_us:  the protocol's parameter `timeout`; None or 0 for none
    deadline_ms: `shoal-deadline-ms`, from now; "" for none
    default_s:   the model's own, from now; a client's deadline replaces it
    """
    wanted_s = []
    if timeout_us is not None:
        if (
            isinstance(timeout_us, bool)
            or not isinstance(timeout_us, int)
            or not 0 <= timeout_us < MAX_DEADLINE_MS * 1e3
        ):
            raise InferenceError(400, f"timeout = {str(timeout_us)[:40]!r}: expected microseconds")
        if timeout_us:
            wanted_s.append(timeout_us / 1e6)
    if deadline_ms:
        try:
            value = float(deadline_ms.replace("_", "?"))  # which Python would accept
        except ValueError:
            value = -1.0
        if not 0 < value < MAX_DEADLINE_MS:
            raise InferenceError(400, f"shoal-deadline-ms = {deadline_ms[:40]!r}: expected milliseconds from now")
        wanted_s.append(value / 1e3)
    if not wanted_s and default_s is not None:
        wanted_s.append(default_s)
    return now_s + min(wanted_s) if wanted_s else None

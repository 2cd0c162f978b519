"""The keys of an endpoint in its spec, and the check of a set of keys."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, field_validator

from shoal.config import Spec
from shoal.errors import ConfigError
from shoal.runs.formatting import parse_duration

ADMINISTRATOR = "administrator"  # the name of a caller with the endpoint's token
ANYONE = "anyone"  # the name of all callers of an endpoint without token and keys
HASH = "sha256:"
HASHED = re.compile(r"sha256:([0-9a-f]{64})", re.IGNORECASE)


def require_usable_secret(secret: SecretStr) -> SecretStr:
    """Check that a header can carry a token or key. Raises ValueError, which does not show it."""
    text = secret.get_secret_value()
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("it is printable ASCII without blanks, and not empty")
    if not text.strip("*"):
        raise ValueError("it was masked when it was printed; give the secret itself")
    return secret


def _read_time(given: object) -> datetime:
    """A duration counts from now, once: the spec has the time. (For pydantic 20270131 were a second of 1970.)"""
    seconds = parse_duration(str(given))
    if seconds is None:
        return datetime.fromisoformat(str(given))
    try:
        return datetime.now(UTC).replace(microsecond=0) + timedelta(0, seconds)
    except OverflowError:
        raise ValueError("is after the year 9999") from None


Expiry = Annotated[
    datetime, BeforeValidator(_read_time), AfterValidator(lambda when: when.replace(tzinfo=when.tzinfo or UTC))
]


class ApiKey(Spec):
    """A key that callers send as `Authorization: Bearer KEY`.

    key:           the key, or `sha256:` and its SHA-256 in hex, so that no file needs the key
    name:          the caller's name in metrics and audit lines, and for fairness between tenants
    models:        the models that it may call; empty for all
    requests_per_s, burst: its rate over the full endpoint, and the burst above it; None: no limit
    input_tokens_per_min, output_tokens_per_min: of texts, over the full endpoint; a minute's worth may come at once
    expires:       when it is known no more: a date or time, in UTC unless it says another; 30d from now; None: never
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)
    key: SecretStr
    models: list[str] = Field(default_factory=list)
    requests_per_s: float | None = Field(default=None, gt=0)
    burst: int = Field(default=10, ge=1, le=1_000_000_000)
    input_tokens_per_min: float | None = Field(default=None, gt=0)
    output_tokens_per_min: float | None = Field(default=None, gt=0)
    expires: Expiry | None = None

    @field_validator("key")
    @classmethod
    def _usable_in_a_header(cls, key: SecretStr) -> SecretStr:
        text = key.get_secret_value()
        if text.lower().startswith(HASH) and HASHED.fullmatch(text) is None:
            raise ValueError(f"behind {HASH} are 64 hexadecimal digits: the SHA-256 of the key")
        return require_usable_secret(key)


def require_distinct_keys(token: str | None, keys: Sequence[ApiKey]) -> None:
    """Check a set of keys. Raises ConfigError for an empty token, two keys with one name, or one key with two names."""
    names, by_digest = {ADMINISTRATOR, ANYONE}, {}
    if token is not None:
        if not token.strip():
            raise ConfigError("token", token, "is empty", "any caller could send it: set $SHOAL_TOKEN, or none")
        by_digest[digest(token)] = ADMINISTRATOR
    for key in keys:
        if key.name in names:
            raise ConfigError("keys.name", key.name, "is taken", "give every key its own name")
        names.add(key.name)
        other = by_digest.setdefault(digest(key.key.get_secret_value()), key.name)
        if other != key.name:
            raise ConfigError("keys.name", key.name, f"has the same key as {other!r}", "give each its own key")


def digest(key: str) -> bytes:
    written = HASHED.fullmatch(key)
    return bytes.fromhex(written[1]) if written else hash_bytes(key.encode())


def hash_bytes(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()

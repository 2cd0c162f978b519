"""Access control of an endpoint: API keys, their models and their rates.

Built from the endpoint's spec, by each replica and once to check the spec. The protocol applications call it for every
request, on one event loop. Stores no key, only hashes, which no log, repr or metric shows. Knows no HTTP beyond the
value of `Authorization`.

A key's rate is that of the full endpoint. Its `n` replicas do not coordinate: each has an equal share, `rate / n`, in a
token bucket of `max(1, burst / n)` requests, which is full when the replica starts. In any `t` seconds with unchanged
replicas the endpoint admits at most `rate * t + max(burst, n)` requests of the key: a burst above the rate, never more.
(A replacement replica adds its full bucket; while a change of `n` spreads, the bound holds with the smallest `n` that a
replica knows.) The endpoint may admit less: a replica that gets more than its part of a key's requests refuses some
while another has tokens left, down to `rate / n` for a caller whose connections all end at one replica.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.errors import InferenceError
from shoal.serve.messages.auth_failures import AuthFailure, AuthFailureCounter
from shoal.serve.messages.inference import Caller
from shoal.serve.spec.api_key import ADMINISTRATOR, ANYONE, ApiKey, digest, hash_bytes, require_distinct_keys

FORWARDED_FROM_HEADER = b"shoal-from"  # set by the ingress, over the client's value
_SCHEME = b"bearer "
MAX_CACHED_HEADERS = 1024  # cached headers with known keys


class TokenBucket:
    """The number of requests allowed now: grows by `rate_per_s` each second, up to `capacity`."""

    __slots__ = ("_at_s", "_tokens")

    def __init__(self, now_s: float) -> None:
        self._at_s, self._tokens = now_s, math.inf  # full, whatever the capacity

    def take(self, now_s: float, rate_per_s: float, capacity: float) -> float:
        """Take a token; returns 0.0, or the seconds until there is one."""
        tokens = min(capacity, self._tokens + (now_s - self._at_s) * rate_per_s)
        self._at_s = now_s
        if tokens >= 1.0:
            self._tokens = tokens - 1.0
            return 0.0
        self._tokens = tokens
        return (1.0 - tokens) / rate_per_s


@dataclass(slots=True)
class _KeyHolder:
    """The holder of a key."""

    caller: Caller
    digest: bytes
    requests_per_s: float | None
    burst: int
    bucket: TokenBucket


class AccessControl:
    """Admits or refuses callers. Without a token and keys, every caller may do everything.

    token:    the administrator's: everything, without a rate
    keys:     each for its models, at its rate; the key, or its `sha256:HEX`, so that no file needs the key
    replicas: the number of replicas that share the keys' rates now

    Raises ConfigError for an empty token, two keys with one name, or one key with two names.
    """

    def __init__(
        self,
        token: str | None,
        keys: Sequence[ApiKey],
        *,
        replicas: Callable[[], int] = lambda: 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replicas, self._clock = replicas, clock
        self._secret = secrets.token_bytes(32)
        self._holders: dict[bytes, _KeyHolder] = {}
        self._header_cache: dict[bytes, _KeyHolder] = {}  # by a keyed hash of the full header, for a direct look-up
        self._counts: Counter[tuple[str, str]] = Counter()
        self._auth_failures = AuthFailureCounter()
        self._open_caller = Caller(ANYONE, administrator=True) if token is None and not keys else None
        require_distinct_keys(token, keys)
        holders: list[tuple[Caller, str, float | None, int]] = [
            (
                Caller(key.name, models=frozenset(key.models) or None),
                key.key.get_secret_value(),
                key.requests_per_s,
                key.burst,
            )
            for key in keys
        ]
        if token is not None:
            holders.append((Caller(ADMINISTRATOR, administrator=True), token, None, 1))
        for caller, secret, rate, burst in holders:
            hashed = digest(secret)
            self._holders[self._hash_slot(hashed)] = _KeyHolder(caller, hashed, rate, burst, TokenBucket(clock()))

    def admit(
        self, authorization: bytes, model: str | None = None, *, administrator: bool = False, origin: bytes = b""
    ) -> Caller:
        """Admit a call of `model`, of an administrator's function, or of any other; returns the caller.

        authorization: the header's value; b"" without it
        origin:        the caller's address, for the record of refused calls
        Raises InferenceError: 401 without a known key, 403 without the right, 429 over its rate.
        """
        if self._open_caller is not None:
            self._counts[ANYONE, "admitted"] += 1
            return self._open_caller
        holder = self._authenticate(authorization, model, origin)
        caller = holder.caller
        if administrator and not caller.administrator:
            self._counts[caller.name, "forbidden"] += 1
            problem = f"the key {caller.name!r} is for models; this takes the endpoint's token"
            raise self._record_failure(caller.name, 403, problem, model, origin)
        if model is not None and not caller.can_see(model):
            self._counts[caller.name, "forbidden"] += 1
            problem = f"the key {caller.name!r} is not for the model {model[:200]!r}"
            raise self._record_failure(caller.name, 403, problem, model, origin)
        if (rate := holder.requests_per_s) is not None:
            replicas = max(1, self._replicas())
            wait_s = holder.bucket.take(self._clock(), rate / replicas, max(1.0, holder.burst / replicas))
            if wait_s > 0.0:
                self._counts[caller.name, "limited"] += 1
                problem = f"the key {caller.name!r} is over its rate of {rate:g} requests/s; try again later"
                raise InferenceError(429, problem, retry_after_s=wait_s)
        self._counts[caller.name, "admitted"] += 1
        return caller

    def require_known_key(self, authorization: bytes, origin: bytes = b"") -> None:
        """Check the key before a call's target is known and its body read. Raises InferenceError (401)."""
        if self._open_caller is None:
            self._authenticate(authorization, None, origin)

    def counts(self) -> dict[str, dict[str, int]]:
        """By the key's name ("" for unknown keys): the calls admitted, forbidden, limited, unknown."""
        counts: dict[str, dict[str, int]] = {}
        for (name, result), count in self._counts.items():
            counts.setdefault(name, {})[result] = count
        return counts

    def get_auth_failures(self) -> tuple[AuthFailure, ...]:
        """Calls refused with 401 or 403 since the replica started, for the audit log."""
        return self._auth_failures.snapshot()

    def _authenticate(self, authorization: bytes, model: str | None, origin: bytes) -> _KeyHolder:
        shown = hashlib.sha256(self._secret + authorization).digest()
        holder = self._header_cache.get(shown) or self._find(authorization)
        if holder is None:
            self._counts["", "unknown"] += 1
            raise self._record_failure("", 401, "a known key is required: Authorization: Bearer KEY", model, origin)
        if len(self._header_cache) < MAX_CACHED_HEADERS:
            self._header_cache[shown] = holder
        return holder

    def _record_failure(self, by: str, status: int, problem: str, model: str | None, origin: bytes) -> InferenceError:
        self._auth_failures.add(by, status, origin.decode("latin-1"), model or "")
        return InferenceError(status, problem)

    def _find(self, authorization: bytes) -> _KeyHolder | None:
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            return None
        hashed = hash_bytes(authorization[len(_SCHEME) :].strip())
        holder = self._holders.get(self._hash_slot(hashed))
        return holder if holder is not None and hmac.compare_digest(holder.digest, hashed) else None

    def _hash_slot(self, digest: bytes) -> bytes:
        """A digest's slot in the table. No caller can compute it, so the time of a look-up reveals nothing about
        keys."""
        return hashlib.blake2b(digest, key=self._secret, digest_size=16).digest()

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

Tokens of texts have buckets of a minute's worth. A text is admitted while its prompt fits and no written token is owed.
They are spent when they are computed: texts that are admitted together may exceed the rate once, and the key waits as
much longer.
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
from datetime import datetime

from pydantic import SecretStr

from shoal.errors import InferenceError
from shoal.serve.messages.auth_failures import AuthFailure, AuthFailureCounter
from shoal.serve.messages.inference import Caller
from shoal.serve.spec.api_key import ADMINISTRATOR, ANYONE, ApiKey, digest, hash_bytes, require_distinct_keys

FORWARDED_FROM_HEADER = b"shoal-from"  # set by the ingress, over the client's value
_SCHEME = b"bearer "
MAX_CACHED_HEADERS = 1024  # cached headers with known keys


class TokenBucket:
    """The number of requests, or of a text's tokens, allowed now: grows by `rate_per_s` each second, up to `capacity`;
    below zero: what is owed."""

    __slots__ = ("_at_s", "_tokens")

    def __init__(self, now_s: float) -> None:
        self._at_s, self._tokens = now_s, math.inf  # full, whatever the capacity

    def take(self, now_s: float, rate_per_s: float, capacity: float) -> float:
        """Take a token; returns 0.0, or the seconds until there is one."""
        wait_s = self.find_wait_s(now_s, rate_per_s, capacity, 1.0)
        if wait_s == 0.0:
            self._tokens -= 1.0
        return wait_s

    def find_wait_s(self, now_s: float, rate_per_s: float, capacity: float, num: float) -> float:
        """The seconds until there are so many, or all that there may be."""
        self._tokens = min(capacity, self._tokens + (now_s - self._at_s) * rate_per_s)
        self._at_s = now_s
        return max(0.0, min(num, capacity) - self._tokens) / rate_per_s

    def spend(self, num: float) -> None:
        self._tokens -= num


class TokenCount:
    """Tokens of texts that a key's requests brought, or were written for it. per_min: its rate; None: no limit"""

    def __init__(self, per_min: float | None, now_s: float) -> None:
        self.per_min = per_min
        self.total = 0
        self.bucket = TokenBucket(now_s)

    def add(self, num: int = 1) -> None:
        self.total += num
        self.bucket.spend(num)


@dataclass(slots=True)
class _KeyHolder:
    """The holder of a key."""

    caller: Caller
    digest: bytes
    requests_per_s: float | None
    burst: int
    bucket: TokenBucket
    expires: datetime | None


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
        self._tokens = {
            name: (TokenCount(None, clock()), TokenCount(None, clock())) for name in (ANYONE, ADMINISTRATOR)
        }
        for key in keys:
            rates = key.input_tokens_per_min, key.output_tokens_per_min
            self._tokens[key.name] = TokenCount(rates[0], clock()), TokenCount(rates[1], clock())
        self._header_cache: dict[bytes, _KeyHolder] = {}  # by a keyed hash of the full header, for a direct look-up
        self._counts: Counter[tuple[str, str]] = Counter()
        self._auth_failures = AuthFailureCounter()
        self._open_caller = Caller(ANYONE, administrator=True) if token is None and not keys else None
        require_distinct_keys(token, keys)
        for key in keys:
            self._add(Caller(key.name, models=frozenset(key.models) or None), key)
        if token is not None:
            administrator = ApiKey.model_construct(key=SecretStr(token))
            self._add(Caller(ADMINISTRATOR, administrator=True), administrator)

    def _add(self, caller: Caller, key: ApiKey) -> None:
        hashed = digest(key.key.get_secret_value())
        bucket = TokenBucket(self._clock())
        holder = _KeyHolder(caller, hashed, key.requests_per_s, key.burst, bucket, key.expires)
        self._holders[self._hash_digest(hashed)] = holder

    def admit(
        self,
        authorization: bytes,
        model: str | None = None,
        *,
        administrator: bool = False,
        origin: bytes = b"",
        is_counted: bool = True,
    ) -> Caller:
        """Admit a call of `model`, of an administrator's function, or of any other; returns the caller.

        authorization: the header's value; b"" without it
        origin:        the caller's address, for the record of refused calls
        is_counted:    to the key's rate; not where another replica has counted the call
        Raises InferenceError: 401 without a known key that has not expired, 403 without the right, 429 over its rate.
        """
        if self._open_caller is not None:
            self._counts[ANYONE, "admitted"] += 1
            return self._open_caller
        holder = self._authenticate(authorization, model, origin)
        caller = holder.caller
        problem = ""
        if administrator and not caller.administrator:
            problem = f"the key {caller.name!r} is for models; this takes the endpoint's token"
        elif model is not None and not caller.can_see(model):
            problem = f"the key {caller.name!r} is not for the model {model[:200]!r}"
        if problem:
            raise self._record_failure(caller.name, "forbidden", problem, model, origin)
        if is_counted and (rate := holder.requests_per_s) is not None:
            replicas = max(1, self._replicas())
            wait_s = holder.bucket.take(self._clock(), rate / replicas, max(1.0, holder.burst / replicas))
            if wait_s > 0.0:
                self._counts[caller.name, "limited"] += 1
                problem = f"the key {caller.name!r} is over its rate of {rate:g} requests/s; try again later"
                raise InferenceError(429, problem, retry_after_s=wait_s)
        self._counts[caller.name, "admitted"] += 1
        return caller

    def admit_tokens(self, caller: Caller, num_input: int) -> tuple[TokenCount, TokenCount]:
        """Admit a text whose prompt has so many tokens; returns where to count those, and those that are written.

        Raises InferenceError (429) over a rate.
        """
        counts = self._tokens[caller.name]
        replicas = max(1, self._replicas())
        for name, count, num in zip(("input", "output"), counts, (num_input, 0), strict=True):
            if count.per_min is not None:
                most = count.per_min / replicas
                if (wait_s := count.bucket.find_wait_s(self._clock(), most / 60, most, num)) > 0.0:
                    self._counts[caller.name, "limited"] += 1
                    problem = f"the key {caller.name!r} is over its rate of {count.per_min:g} {name} tokens/min"
                    raise InferenceError(429, f"{problem}; try again later", retry_after_s=wait_s)
        return counts

    def count_tokens(self) -> dict[str, dict[str, int]]:
        """By the key's name: the tokens of prompts, and those that were written."""
        return {
            name: {"input": read.total, "output": written.total}
            for name, (read, written) in self._tokens.items()
            if read.total
        }

    def require_known_key(self, authorization: bytes, origin: bytes = b"") -> None:
        """Check the key before a call's target is known and its body read. Raises InferenceError (401)."""
        if self._open_caller is None:
            self._authenticate(authorization, None, origin)

    def counts(self) -> dict[str, dict[str, int]]:
        """By the key's name ("" for unknown keys): the calls admitted, forbidden, limited, expired, unknown."""
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
            problem = "a known key is required: Authorization: Bearer KEY"
            raise self._record_failure("", "unknown", problem, model, origin)
        if holder.expires is not None and time.time() >= holder.expires.timestamp():
            name = holder.caller.name
            problem = f"the key {name!r} has expired at {holder.expires.isoformat()}: another is required"
            raise self._record_failure(name, "expired", problem, model, origin)
        if len(self._header_cache) < MAX_CACHED_HEADERS:
            self._header_cache[shown] = holder
        return holder

    def _record_failure(self, by: str, result: str, problem: str, model: str | None, origin: bytes) -> InferenceError:
        self._counts[by, result] += 1
        status = 403 if result == "forbidden" else 401
        self._auth_failures.add(by, status, origin.decode("latin-1"), model or "")
        return InferenceError(status, problem)

    def _find(self, authorization: bytes) -> _KeyHolder | None:
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            return None
        hashed = hash_bytes(authorization[len(_SCHEME) :].strip())
        holder = self._holders.get(self._hash_digest(hashed))
        return holder if holder is not None and hmac.compare_digest(holder.digest, hashed) else None

    def _hash_digest(self, digest: bytes) -> bytes:
        """A digest's slot in the table. No caller can compute it, so the time of a look-up reveals nothing about
        keys."""
        return hashlib.blake2b(digest, key=self._secret, digest_size=16).digest()

"""What an endpoint is: the spec that jobs and the CLI write, and the numbers derived from it. No Ray, no torch."""

from __future__ import annotations

import ipaddress

from pydantic import Field, SecretStr, field_validator, model_validator

from shoal.config import Spec


class EndpointSpec(Spec):
    """One served model.

    name:           the model's name in URLs: letters, digits, `-`, `_` and `.`
    host, port:     where the ingress listens; loopback only; 0 is a free port
    num_replicas:   processes that each hold the model and follow the weights by themselves
    max_batch_size: rows that one forward may hold
    max_queue_size: rows per replica that may wait before requests are refused with 429
    max_body_bytes: a larger request is refused with 413
    token:          when set, everything but the health of the server asks for `Authorization: Bearer TOKEN`
    torch_threads:  threads of one forward; 1 is best for small models under load
    num_cpus:       what each replica reserves of the cluster
    drain_s:        how long a replica that is being stopped finishes what it has
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=120)
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    num_replicas: int = Field(default=1, ge=1)
    max_batch_size: int = Field(default=64, ge=1)
    max_queue_size: int = Field(default=1024, ge=1)
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1)
    token: SecretStr | None = None
    torch_threads: int = Field(default=1, ge=1)
    num_cpus: float = Field(default=1.0, ge=0)
    drain_s: float = Field(default=10.0, gt=0)

    @field_validator("host")
    @classmethod
    def _loopback(cls, host: str) -> str:
        try:
            loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
        except ValueError:
            loopback = False
        if not loopback:
            raise ValueError("an endpoint speaks plain HTTP and listens on loopback; put encryption in front of it")
        return host

    @field_validator("token")
    @classmethod
    def _usable_in_a_header(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None:
            text = token.get_secret_value()
            if not text or not text.isascii() or not text.isprintable() or " " in text:
                raise ValueError("a token is printable ASCII without blanks, and not empty")
            if not text.strip("*"):
                raise ValueError("this is a token that was masked when it was printed; give the token itself")
        return token

    @model_validator(mode="after")
    def _queue_holds_a_batch(self) -> EndpointSpec:
        if self.max_queue_size < self.max_batch_size:
            raise ValueError(f"max_queue_size = {self.max_queue_size} is below max_batch_size = {self.max_batch_size}")
        return self

    @property
    def max_ongoing_requests(self) -> int:
        """What Serve may let into a replica: the queue, two batches in hand, and room for those that are refused.

        Serve's default of 5 would keep requests out of the batcher, whose queue is the one that counts and refuses.
        """
        return 2 * (self.max_queue_size + 2 * self.max_batch_size)

    def bearer(self) -> bytes | None:
        """The value that `Authorization` must have, or None when no token is asked for."""
        return None if self.token is None else f"Bearer {self.token.get_secret_value()}".encode()

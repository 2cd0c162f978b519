"""The spec of a topic of an MQTT broker. Imports neither torch nor a client of MQTT."""

from __future__ import annotations

from pydantic import Field, SecretStr

from shoal.config import Spec


class MqttSpec(Spec):
    """A topic of an MQTT 5 broker.

    broker:            HOST or HOST:PORT
    topic:             a filter, of one topic or with wildcards
    client_id:         names the session in which the broker holds what is not acknowledged
    receive_maximum:   messages that the broker may send beyond the last acknowledged one
    session_expiry_s:  how long the broker holds messages for a run that is away
    username, password, has_tls: of the broker
    connect_timeout_s: for the first connection
    """

    broker: str = ""
    topic: str = ""
    client_id: str = ""
    receive_maximum: int = Field(default=4000, ge=1, le=65535)
    session_expiry_s: int = Field(default=86400, ge=1, lt=2**32)
    username: str = ""
    password: SecretStr = SecretStr("")
    has_tls: bool = False
    connect_timeout_s: float = Field(default=10.0, gt=0)

"""Every call of an endpoint without its tensors: builds its request and decodes its answer. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from shoal.client.endpoint_status import ROLLOUT_PATH, STATUS_PATH
from shoal.client.retry import EndpointRequest, Reply
from shoal.errors import ConfigError, ConnectionLost
from shoal.open_inference.episodes import EPISODES_PATH, EpisodeAnswer, EpisodeRequest
from shoal.open_inference.messages import Parameters, RepositoryRequest

T = TypeVar("T")
Value = bool | int | float | str | Mapping[str, Any] | None

LIVE, READY = (EndpointRequest("GET", f"/v2/health/{each}") for each in ("live", "ready"))
INDEX = EndpointRequest("POST", "/v2/repository/index", {"content-type": "application/json"}, b"{}")
STATUS = EndpointRequest("GET", STATUS_PATH)


def build_infer_request(
    model: str,
    version: int | None,
    headers: Mapping[str, str],
    body: bytes,
    *,
    sticky: str,
    track: str,
    action: str = "infer",
) -> EndpointRequest:
    """Build an inference request with an encoded body, of tensors (`infer`) or `rows`; `version` None leaves the choice
    to the endpoint. Raises ConfigError."""
    of_version = "" if version is None else f"/versions/{version}"
    path = f"/v2/models/{_quote_segment('model', model)}{of_version}/{action}"
    return EndpointRequest("POST", path, {**headers, **_name_side(sticky, track)}, body)


def build_text_request(path: str, body: Mapping[str, Any], sticky: str, track: str) -> EndpointRequest:
    """Request a text, with a body of `streamed_text.build_body`."""
    headers = {**_JSON, **_name_side(sticky, track)}
    return EndpointRequest("POST", f"/v1/{path}", headers, msgspec.json.encode(body), streams=True)


def _name_side(sticky: str, track: str) -> dict[str, str]:
    given = {"sticky": sticky, "track": track}
    return {f"shoal-{field}": _quote_segment(field, value, _PLAIN) for field, value in given.items() if value}


def ask_model(model: str, of: str = "", below: str = "/v2/models/") -> EndpointRequest:
    """Ask for what an endpoint says of a model."""
    return EndpointRequest("GET", f"{below}{_quote_segment('model', model)}{of}")


def build_repository_request(action: str, model: str, parameters: Parameters) -> EndpointRequest:
    """The repository extension: load or unload a model."""
    body = msgspec.json.encode(RepositoryRequest(parameters or None))
    return EndpointRequest("POST", f"/v2/repository/models/{_quote_segment('model', model)}/{action}", _JSON, body)


def build_rollout_request(change: Mapping[str, Value]) -> EndpointRequest:
    """Request a change of the rollout; fields of None are left out."""
    fields = {name: _spell_infinity(value) for name, value in change.items() if value is not None}
    program = {"shoal-program": str(fields.pop("program"))} if "program" in fields else {}
    return EndpointRequest("POST", ROLLOUT_PATH, {**_JSON, **program}, msgspec.json.encode(fields))


def _spell_infinity(value: Any) -> Any:
    """Write NaN and infinities as text, which options are read from: JSON would have null for them, which is none."""
    if isinstance(value, Mapping):
        return {name: _spell_infinity(each) for name, each in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Episode(NamedTuple):
    """The handle of an episode that a live policy acts for a user: see `Client.act`."""

    model: str
    id: str


def build_episode_request(
    model: str,
    episode: Episode | None,
    observation: ArrayLike | None = None,
    reward: float | None = None,
    *,
    ended: bool = False,
    truncated: bool = False,
) -> EndpointRequest:
    """A step, a reward or the end of an episode. Raises ConfigError for NaN and infinity, which JSON cannot carry."""
    for name, value in (("reward", reward), ("observation", observation)):
        if value is not None and (array := np.asarray(value)).dtype.kind == "f" and not np.isfinite(array).all():
            raise ConfigError(name, value, "has NaN or infinite values", "give finite numbers")
    values = None if observation is None else np.asarray(observation).tolist()
    request = EpisodeRequest(model, episode.id if episode else "", values, reward, ended, truncated)
    return EndpointRequest("POST", EPISODES_PATH, _JSON, msgspec.json.encode(request))


def decode_action(model: str, reply: Reply) -> tuple[Any, Episode]:
    """The action, an array unless it is a number, and the handle."""
    answer = decode(reply, EpisodeAnswer)
    action = np.array(answer.action) if isinstance(answer.action, list) else answer.action
    return action, Episode(model, answer.episode)


def decode(reply: Reply, kind: type[T]) -> T:
    """Decode the body as a message. Raises ConnectionLost when the server does not speak the protocol."""
    try:
        return msgspec.json.decode(reply.body, type=kind)
    except msgspec.DecodeError as error:
        raise ConnectionLost(f"the server is no endpoint of this kind: {error}") from None


_PLAIN = "".join(map(chr, range(0x21, 0x7F))).replace("%", "")  # the characters that a header takes unescaped
_JSON = {"content-type": "application/json"}


def _quote_segment(field: str, segment: str, safe: str = "") -> str:
    if not isinstance(segment, str):
        raise ConfigError(field, segment, "is not a str", "make it one")
    return quote(segment, safe=safe)

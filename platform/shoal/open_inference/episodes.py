"""Shoal's extension of the protocol by which an endpoint's users teach a live policy: one request for each call.

    POST /shoal/v1/episodes  {"model": "cartpole", "observation": [...]}                     begins an episode
                             {"model": "cartpole", "episode": "...", "reward": 1.0}          rewards its last action
                             {"model": ..., "episode": ..., "observation": [...]}            asks for its next action
                             {"model": ..., "episode": ..., "ended": true}                   ends it

Called by the endpoint, by the client and by a run's gateway. Pure data.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

EPISODES_PATH = "/shoal/v1/episodes"


class EpisodeRequest(msgspec.Struct, frozen=True):
    """One call. The fields may be combined: the reward belongs to the action before the observation.

    episode:     the handle of an episode; "" begins one
    observation: in the shape of the run's observations; at the end of an episode, the one after its last action
    reward:      added to that of the last action
    ended:       the episode is over: in a terminal state, or `truncated` by a limit
    """

    model: str
    episode: str = ""
    observation: list[Any] | None = None
    reward: float | None = None
    ended: bool = False
    truncated: bool = False


class EpisodeAnswer(msgspec.Struct, frozen=True):
    """The answer. `action` is None unless an observation asked for one; `version` is that of its weights."""

    episode: str
    action: int | float | list[Any] | None = None
    version: int = 0


class EpisodeService(Protocol):
    """Where users' episodes are acted and recorded."""

    async def take(self, request: EpisodeRequest) -> EpisodeAnswer:
        """Raises InferenceError: 404 for a handle that is none, 409 while its action is on its way, 410 for an episode
        that has ended or expired, 422 for values outside of the run's spec, 429 for too many, 503 while the run's
        gateway is away."""
        ...

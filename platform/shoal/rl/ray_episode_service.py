"""What the replicas of a run's endpoint ask of its gateway: the actions for users who also reward them."""

from __future__ import annotations

from typing import cast

import ray
from ray.actor import ActorHandle

from shoal.errors import InferenceError, summarize_error
from shoal.open_inference.episodes import EpisodeAnswer, EpisodeRequest
from shoal.ray_call import AWAY, NAMESPACE
from shoal.rl.gateway.user_episodes import EpisodeRejection


class RayEpisodeService:
    """An EpisodeService on the gateway of a run, for the replicas of its endpoint. name: of the gateway's worker"""

    def __init__(self, name: str) -> None:
        self._name = name
        self._gateway: ActorHandle | None = None

    async def take(self, request: EpisodeRequest) -> EpisodeAnswer:
        try:
            if self._gateway is None:
                self._gateway = ray.get_actor(self._name, NAMESPACE)
            answer = await self._gateway.take_episode.remote(request)
        except (*AWAY, ValueError) as error:  # no actor has the name yet
            reason = f"the run's gateway is away: {summarize_error(error)}"
            raise InferenceError(503, reason, retry_after_s=1.0) from error
        if isinstance(answer, EpisodeRejection):
            raise InferenceError(answer.status, answer.message)
        return cast("EpisodeAnswer", answer)

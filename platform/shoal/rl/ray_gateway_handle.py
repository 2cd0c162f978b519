"""What others ask of a gateway's worker: the learner experience, the endpoint's replicas actions for users."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import ray
from ray.actor import ActorHandle

from shoal.errors import ConnectionLost, InferenceError, summarize_error
from shoal.open_inference.episodes import EpisodeAnswer, EpisodeRequest
from shoal.ray_call import AWAY, CALL_TIMEOUT_S, NAMESPACE, RETRY_S, call_or_none, call_until_answered
from shoal.rl.experience.queue import BatchRequest, ExperienceBatch
from shoal.rl.gateway.user_episodes import EpisodeRejection
from shoal.wire import DropReason

ACKNOWLEDGE_TIMEOUT_S = 60.0  # how long a learner retries its acknowledgement while the gateway restarts


class RayExperienceSource:
    """An ExperienceSource on a gateway's handle. While the gateway restarts, `take` is empty and `acknowledge`
    waits."""

    def __init__(self, gateway: ActorHandle) -> None:
        self._gateway = gateway

    def take(self, consumer: str, request: BatchRequest) -> ExperienceBatch | None:
        limit_s = request.timeout_s + CALL_TIMEOUT_S
        payload = call_or_none(self._gateway.take, consumer, request, timeout_s=limit_s, away=AWAY, pause_s=RETRY_S)
        return None if payload is None else ExperienceBatch.from_bytes(payload)

    def acknowledge(self, lease_id: int, outcomes: Sequence[DropReason | None], evidence: Sequence[float] = ()) -> bool:
        try:
            method = self._gateway.acknowledge
            return bool(call_until_answered(method, lease_id, outcomes, evidence, patience_s=ACKNOWLEDGE_TIMEOUT_S))
        except AWAY as error:
            raise ConnectionLost(f"the gateway has been away for {ACKNOWLEDGE_TIMEOUT_S} s") from error


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

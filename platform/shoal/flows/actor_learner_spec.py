"""The spec of a run of the loop. Imports neither torch nor Ray: overrides are checked before a cluster starts.

Used by the files of `jobs/` and `serve_apps/`, by `actor_learner` and by its workers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from shoal.actor.environment import has_environment
from shoal.registry import AliasNames
from shoal.rl.spec import RLSpec
from shoal.serve.spec.endpoint import TOKEN_FROM_ENVIRONMENT, EndpointSpec, with_default_values

NAMED_BY_ENV = "named-by-env"
ONLY_POLICY = ""  # the name of the policy of a run that has one
_IS_JOB = re.compile(r"\bActorLearnerSpec\b")
TRIAL_FACTOR = 6  # docs/decisions/028-trials.md


class ActorLearnerSpec(RLSpec):
    """One run of the loop. `resume` names an earlier run to continue."""

    recorded_always = ("target_return",)
    main_fields = (
        *("env", "model", "target_return", "max_wall_s", "algorithm.name", "algorithm.learning_rate"),
        *("learner.batch_steps", "gateway.port", "gateway.websocket", "demonstrations.source", "resume"),
    )
    page = "algorithms.md"

    target_return: float | None = Field(default=475.0, description="mean of 100 episodes at which to stop")
    max_wall_s: float = Field(
        default=600.0, gt=0, description="from the first segment; then the run ends, not reached if it has a target"
    )
    eval_episodes: int = Field(default=20, ge=1)
    trial_episodes: int | None = Field(
        default=None, ge=1, description="that make a target sure before; default: six times eval_episodes"
    )
    eval_timeout_s: float = Field(default=300.0, gt=0, description="for eval_episodes, and for as many of a trial")
    endpoint: Annotated[EndpointSpec, with_default_values(name=NAMED_BY_ENV, num_cpus=0.5), TOKEN_FROM_ENVIRONMENT] = (
        EndpointSpec(name=NAMED_BY_ENV, num_cpus=0.5)
    )
    action: Literal["best", "sampled", "average"] | None = Field(
        default=None,
        description="how trial, endpoint and registered version act; average: with self-play, a past version for each"
        " episode; default: best, or sampled where that alone passes the trial",
    )
    aliases: AliasNames | None = None
    record_every: int = Field(
        default=0, ge=0, description="film one of so many episodes of the first actor of --actors; 0: none"
    )
    resume: str = ""

    @model_validator(mode="after")
    def _average_has_a_pool(self) -> ActorLearnerSpec:
        if self.action == "average" and not self.self_play.snapshot_every:
            raise ValueError("action=average plays a run's past versions: set self_play.snapshot_every")
        return self

    @property
    def num_trial_episodes(self) -> int:
        """The number of episodes in a trial. Without a target no trial is needed."""
        if self.target_return is None:
            return self.eval_episodes
        return self.trial_episodes or TRIAL_FACTOR * self.eval_episodes

    @property
    def model_name(self) -> str:
        """The name of the endpoint and of the registered model: "cartpole" for CartPole-v1 unless it is given."""
        if self.endpoint.name != NAMED_BY_ENV:
            return self.endpoint.name.lower()
        if not has_environment(self.env):
            return re.sub(r"[^a-z0-9._-]+", "-", self.given.get("name", "").lower()).strip("-._") or "game"
        name = re.sub(r"-v\d+$", "", self.env.rpartition(":")[2].rpartition("/")[2]).lower()
        return re.sub(r"[^a-z0-9._-]+", "-", name).strip("-._") or "policy"

    def split_by_policy(self) -> dict[str, ActorLearnerSpec]:
        """What each policy of the run learns with, by its name."""
        return {ONLY_POLICY: self}

    def assign_policies(self) -> dict[str, str]:
        """The policy of each agent, in a run of several; otherwise empty."""
        return {}


def is_loop_job(path: Path) -> bool:
    """Whether a file is a job of the loop, whose `spec()` gives an ActorLearnerSpec. Runs nothing of it."""
    return path.is_file() and bool(_IS_JOB.search(path.read_text(errors="replace")))

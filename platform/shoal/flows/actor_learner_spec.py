"""The spec of a run of the loop, of one policy or of several.

Imports neither torch nor Ray: overrides are checked before a cluster starts. Used by the files of `jobs/` and
`serve_apps/`, by `actor_learner` and by its workers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from shoal.actor.environment import ASK, has_environment
from shoal.config import Spec
from shoal.models.network_source import AnyNetworkSource
from shoal.registry import AliasNames
from shoal.rl.algorithm_config import AnyAlgorithmConfig
from shoal.rl.spec import RLSpec
from shoal.serve.spec.endpoint import TOKEN_FROM_ENVIRONMENT, EndpointSpec, with_default_values

NAMED_BY_ENV = "named-by-env"
ONLY_POLICY = ""  # the name of the policy of a run that has one
_IS_JOB = re.compile(r"\bActorLearnerSpec\b")
_IS_POLICY_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
_POLICY_FIELDS = ("algorithm", "model", "hidden", "core", "core_size")
TRIAL_FACTOR = 6  # docs/decisions/028-trials.md


class ActorLearnerSpec(RLSpec):
    """One run of the loop. `resume` names an earlier run to continue."""

    recorded_always = ("target_return",)
    main_fields = (
        "env",
        "model",
        "target_return",
        "max_wall_s",
        "algorithm.name",
        "algorithm.learning_rate",
        "learner.batch_steps",
        "gateway.port",
        "gateway.websocket",
        "demonstrations.source",
        "resume",
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


class AgentPolicySpec(Spec):
    """One policy of a run: the agents that have it, and where it differs from the run's fields.

    opponents: registered versions of this policy, in the pool of its agents' past versions
    """

    agents: tuple[str, ...] = Field(min_length=1)
    algorithm: AnyAlgorithmConfig | None = None
    model: AnyNetworkSource = None
    hidden: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    core: str | None = None
    core_size: int | None = Field(default=None, ge=1)
    opponents: tuple[str, ...] = ()
    target_return: float | None = Field(default=None, description="mean of 100 episodes; of all policies that have one")


class PoliciesSpec(ActorLearnerSpec):
    """One run of several policies. Its fields are those of each policy, where that has none of its own.

    The run ends when each policy with a `target_return` has reached it, or after `max_wall_s`; without targets, after
    `max_wall_s`. The policy NAME is registered as MODEL-NAME. A `gateway.port` is that of the first policy's gateway,
    and so are `gateway.websocket` and the port of a `gateway.advertise`; the others have the next ones.
    """

    target_return: None = Field(default=None, description="of a policy: policies.NAME.target_return")
    policies: dict[str, AgentPolicySpec] = Field(min_length=1)

    @model_validator(mode="after")
    def _policies_fit(self) -> PoliciesSpec:
        taken: dict[str, str] = {}
        for name, each in self.policies.items():
            if not _IS_POLICY_NAME.fullmatch(name):
                raise ValueError(f"policies.{name}: a name has lower-case letters, digits, - and _")
            for agent in each.agents:
                if agent in taken:
                    raise ValueError(f"policies.{name}.agents: {agent} has the policy {taken[agent]} already")
                taken[agent] = name
        if self.env == ASK or (self.given and self.given.get("policies", {}).keys() != self.policies.keys()):
            names = ", ".join(f"{name}: {{...}}" for name in self.policies)
            raise ValueError(f"env: of games alone, a run of several policies takes {{policies: {{{names}}}}}")
        alone = [name for name in self.policies if not self.make_policy_spec(name).self_play.is_on]
        if 0 < len(alone) < len(self.policies):
            problem = f"{' and '.join(alone)} would have no opponents"
            raise ValueError(f"policies.NAME.opponents: {problem}: set self_play.snapshot_every, or give all some")
        if self.self_play.opponents:
            raise ValueError("self_play.opponents: of a policy they are policies.NAME.opponents")
        return self

    def split_by_policy(self) -> dict[str, ActorLearnerSpec]:
        return {name: self.make_policy_spec(name) for name in self.policies}

    def assign_policies(self) -> dict[str, str]:
        return {agent: name for name, policy in self.policies.items() for agent in policy.agents}

    def make_policy_spec(self, name: str) -> ActorLearnerSpec:
        """What this policy learns with, and the name that it is served and registered by."""
        policy = self.policies[name]
        values: dict[str, Any] = {field: getattr(self, field) for field in ActorLearnerSpec.model_fields}
        values |= {field: each for field in _POLICY_FIELDS if (each := getattr(policy, field)) is not None}
        if self.given:
            values["env"] = {"name": self.model_name, **self.given["policies"][name]}
        values["self_play"] = self.self_play.model_copy(update={"opponents": policy.opponents})
        values["gateway"] = self.gateway.shift_ports(self.gateway.shards * list(self.policies).index(name))
        values["endpoint"] = self.endpoint.model_copy(update={"name": f"{self.model_name}-{name}"})
        return ActorLearnerSpec.parse(values | {"target_return": policy.target_return})


def is_loop_job(path: Path) -> bool:
    """Whether a file is a job of the loop, whose `spec()` gives an ActorLearnerSpec. Runs nothing of it."""
    return path.is_file() and bool(_IS_JOB.search(path.read_text(errors="replace")))

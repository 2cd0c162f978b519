"""The spec of a run of several policies. Imports neither torch nor Ray."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field, model_validator

from shoal.actor.environment import ASK
from shoal.config import Spec
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.models.network_source import AnyNetworkSource
from shoal.rl.algorithm_config import AnyAlgorithmConfig

_IS_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
_OWN_FIELDS = ("algorithm", "model", "hidden", "core", "core_size")


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
            if not _IS_NAME.fullmatch(name):
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
        values |= {field: each for field in _OWN_FIELDS if (each := getattr(policy, field)) is not None}
        if self.given:
            values["env"] = {"name": self.model_name, **self.given["policies"][name]}
        values["self_play"] = self.self_play.model_copy(update={"opponents": policy.opponents})
        values["gateway"] = self.gateway.shift_ports(list(self.policies).index(name))
        values["endpoint"] = self.endpoint.model_copy(update={"name": f"{self.model_name}-{name}"})
        return ActorLearnerSpec.parse(values | {"target_return": policy.target_return})

"""What a run of the loop is told. Neither torch nor Ray: words are checked before a cluster is started for them.

Called by the files of `jobs/` and `serve_apps/`; `actor_learner` goes by it, and so do its workers.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from shoal.registry import AliasNames
from shoal.rl.spec import RLSpec
from shoal.serve.spec.endpoint import TOKEN_FROM_ENVIRONMENT, EndpointSpec, with_default_values

NAMED_BY_ENV = "named-by-env"


class ActorLearnerSpec(RLSpec):
    """One run of the loop. `resume` names an earlier run to go on with."""

    target_return: float | None = Field(default=475.0, description="mean of 100 episodes at which to stop")
    max_wall_s: float = Field(default=600.0, gt=0, description="from the first segment; then the run has failed")
    eval_episodes: int = Field(default=20, ge=1)
    eval_timeout_s: float = Field(default=300.0, gt=0, description="for the episodes of one trial or evaluation")
    endpoint: Annotated[EndpointSpec, with_default_values(name=NAMED_BY_ENV, num_cpus=0.5), TOKEN_FROM_ENVIRONMENT] = (
        EndpointSpec(name=NAMED_BY_ENV, num_cpus=0.5)
    )
    aliases: AliasNames = ("champion",)
    resume: str = ""

    @property
    def model_name(self) -> str:
        """The endpoint's name, and the model's in the registry: "cartpole" for CartPole-v1 unless it is given."""
        if self.endpoint.name != NAMED_BY_ENV:
            return self.endpoint.name.lower()
        name = re.sub(r"-v\d+$", "", self.env.rpartition(":")[2].rpartition("/")[2]).lower()
        return re.sub(r"[^a-z0-9._-]+", "-", name).strip("-._") or "policy"

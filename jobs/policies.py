"""External actors teach several policies at once, in a game of several agents: by default each agent has its own.

    shoal run policies env=zoo.yaml gateway.websocket=8765                  # the games' spaces, by policy, in a file
    shoal run policies env=my_games.py:make_field --actors 2                # an environment; each agent has a policy
    shoal run policies env=zoo.yaml policies.cat.algorithm=dqn policies.mouse.target_return=5
    shoal run policies env=my_games.py:make_field policies.pack.agents='[left,right]' policies.prey.agents='[prey]'

Without `env`, that of jobs/tag.py. docs/algorithms/several-policies.md explains the fields.
"""

from collections.abc import Sequence
from typing import Any

import shoal.runs
from shoal.actor.agent_streams import is_parallel
from shoal.actor.environment import has_environment, open_environment
from shoal.cluster.job_main import job_main
from shoal.config import last_override, merge, parse_overrides
from shoal.errors import ConfigError
from shoal.flows.actor_learner import run_actor_learner
from shoal.flows.actor_learner_spec import ActorLearnerSpec, PoliciesSpec
from shoal.flows.rl_policy import check

TAG = "shoal.libs.games.tag:Tag"


def spec(words: Sequence[str] = ()) -> PoliciesSpec:
    """With the policies that the words name, or those of the game."""
    if resumed := last_override(words, "resume"):
        return PoliciesSpec.from_record(shoal.runs.load(resumed).spec, words)
    game = ActorLearnerSpec(env=last_override(words, "env") or TAG)
    named: dict[str, Any] = parse_overrides(PoliciesSpec, words).get("policies", {})
    is_assigned = any("agents" in each for each in named.values())
    names = [] if is_assigned and not game.given else list_policies(game)
    policies = merge({name: {"agents": [name]} for name in names}, named)
    return PoliciesSpec.parse({"env": game.env, "policies": policies}).override(words)


def list_policies(game: ActorLearnerSpec) -> list[str]:
    """Those whose spaces the game gives, or its agents. Raises ConfigError."""
    if not has_environment(game.env):
        if "policies" not in game.given:
            remedy = (
                "write `policies: {cat: {observation: [4], action: 3}, mouse: {...}}`, or use `shoal run actor_learner`"
            )
            raise ConfigError("env", game.env, "gives no spaces of several policies", remedy)
        return list(game.given["policies"])
    with open_environment(game.env) as environment:
        if not is_parallel(environment):
            raise ConfigError("env", game.env, "has one agent", "use `shoal run actor_learner`")
        return [str(agent) for agent in environment.possible_agents]


if __name__ == "__main__":
    job_main(spec, run_actor_learner, job="policies", check=check)

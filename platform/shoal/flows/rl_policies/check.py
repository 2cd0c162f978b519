"""The checks of a run of several policies before anything starts. Needs neither Ray nor torch."""

from __future__ import annotations

import os

import numpy as np

import shoal.runs
from shoal.actor.agent_streams import is_parallel
from shoal.actor.environment import open_environment
from shoal.cluster.job_main import ACTORS_INFERENCE
from shoal.errors import ConfigError, SpecMismatch
from shoal.flows.rl_policies.spec import PoliciesSpec, require_all_assigned
from shoal.flows.rl_policy import inspect_environment, require_disk_space, require_playable_opponents
from shoal.rl.gateway.sessions import LOCAL
from shoal.wire import ExperienceSpec


def check_policies(spec: PoliciesSpec) -> dict[str, tuple[ExperienceSpec, np.ndarray]]:
    """By policy, the format of its experience and a first observation. Raises ConfigError, and SpecMismatch for a
    resumed run that has learnt something else; called before anything starts."""
    with open_environment(spec.env, spec.ignore) as environment:
        if not is_parallel(environment):
            raise ConfigError("env", spec.env, "has one agent", "use a job of one policy, as jobs/actor_learner.py")
        require_all_assigned(spec, list(environment.possible_agents))
    found = {}
    run = shoal.runs.load(spec.resume) if spec.resume else None
    if run is not None:
        before = PoliciesSpec.from_record(run.spec, leave_out=["endpoint"])
        for name in {**before.policies, **spec.policies}:
            learnt, asked = (describe_network(each, name) for each in (before, spec))
            if differing := [key for key in {**learnt, **asked} if learnt.get(key) != asked.get(key)]:
                key = differing[0]
                problem = f"run {run.id} has learnt {'with ' + str(learnt[key]) if key in learnt else 'without it'}"
                raise SpecMismatch(
                    f"policies.{name}.{key}", asked.get(key), problem, "leave it out, or begin a new run"
                )
    for name, policy in spec.policies.items():
        own = spec.make_policy_spec(name)
        found[name] = inspect_environment(own, os.environ.get(ACTORS_INFERENCE, LOCAL), policy.agents)
        require_playable_opponents(own, found[name][0])
        if own.algorithm.disk_mb:
            folder = None if run is None else run.folder / name / "checkpoints" / "replay"
            require_disk_space(own.algorithm.disk_mb, folder)
    return found


def describe_network(spec: PoliciesSpec, name: str) -> dict[str, object]:
    """What a checkpoint of a policy depends on; empty if the run has no such policy."""
    if name not in spec.policies:
        return {}
    own = spec.make_policy_spec(name)
    return {
        "agents": list(spec.policies[name].agents),
        "env": own.env,
        "ignore": list(own.ignore),
        "normalize_observations": own.normalize_observations,
        "normalize_rewards": own.normalize_rewards,
        "model": own.model.word if own.model is not None else "",
        "hidden": list(own.hidden),
        "core": [own.applied_core, own.core_size],
        "algorithm": [own.algorithm.name, own.algorithm.get_model_options()],
        "opponents": list(own.self_play.opponents),
    }

"""The checks of a run of several policies before anything starts. Needs neither Ray nor torch."""

from __future__ import annotations

import numpy as np

import shoal.runs
from shoal.actor.agent_streams import is_parallel
from shoal.actor.environment import open_environment
from shoal.errors import ConfigError, SpecMismatch
from shoal.flows.rl_policies.spec import PoliciesSpec, require_all_assigned
from shoal.flows.rl_policy import inspect_environment, require_disk_space, require_playable_opponents
from shoal.wire import ExperienceSpec

UNCHANGED = ("env", "algorithm", "model", "hidden", "core", "core_size", "self_play", "policies")


def check_policies(spec: PoliciesSpec) -> dict[str, tuple[ExperienceSpec, np.ndarray]]:
    """By policy, the format of its experience and a first observation. Raises ConfigError, and SpecMismatch for a
    resumed run that has learnt something else; called before anything starts."""
    with open_environment(spec.env) as environment:
        if not is_parallel(environment):
            raise ConfigError("env", spec.env, "has one agent", "use a job of one policy, as jobs/actor_learner.py")
        require_all_assigned(spec, list(environment.possible_agents))
    found = {}
    run = shoal.runs.load(spec.resume) if spec.resume else None
    if run is not None:
        before = PoliciesSpec.from_record(run.spec, [])
        for name in UNCHANGED:
            if getattr(spec, name) != getattr(before, name):
                problem = f"run {run.id} has learnt with {getattr(before, name)}"
                raise SpecMismatch(name, str(getattr(spec, name)), problem, "leave it out, or begin a new run")
    for name, policy in spec.policies.items():
        own = spec.make_policy_spec(name)
        found[name] = inspect_environment(own, agents=policy.agents)
        require_playable_opponents(own, found[name][0])
        if own.algorithm.disk_mb:
            folder = None if run is None else run.folder / name / "checkpoints" / "replay"
            require_disk_space(own.algorithm.disk_mb, folder)
    return found

"""A registered policy that nobody has taught."""

from typing import Any

from registered import arrays_of
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.rl_policy import describe_policy_model, inspect_environment, register_policy
from shoal.weights import WeightSnapshot


def register_random(env: str, *overrides: str, members: int = 0) -> ActorLearnerSpec:
    """Register weights at random as the next version of `game`; returns the spec. members: of a mixture"""
    import torch

    spec = ActorLearnerSpec(env=env).override(["endpoint.name=game", *overrides])
    experience, _ = inspect_environment(spec)
    model: Any = describe_policy_model(spec, experience)[0].build()
    torch.manual_seed(3)
    for each in model.parameters():
        torch.nn.init.normal_(each, std=0.5)
    weights = arrays_of(model)
    pool = [WeightSnapshot.of(number, weights) for number in range(members)]
    register_policy(spec, experience, WeightSnapshot.of(1, weights), "run", {"mean_return": 1, "steps": 1}, pool=pool)
    return spec

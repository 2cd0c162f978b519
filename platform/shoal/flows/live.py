"""The policy of a run as an endpoint follows it: its weights as they are published, version by version.

Asked by the flow that serves; connects to the run's weight store, starts nothing.
"""

from __future__ import annotations

import shoal.runs
from shoal.errors import RunError
from shoal.flows.actor_learner import ActorLearnerSpec
from shoal.flows.policy import look_at_environment, served_model
from shoal.runs import Status
from shoal.serve.sources import LiveModel, ServedModel
from shoal.weights.ray_weights import RayWeightSource, start_weight_store


def live_model(ref: str) -> ServedModel:
    """What the run `ref` learns now. Raises RunError when it is over, or learns no policy."""
    run = shoal.runs.load(ref)
    if run.job != "actor_learner":
        raise RunError(f"run {run.id} is a {run.job!r}: only the policy of an actor_learner is published as it learns")
    if run.status is not Status.RUNNING:
        remedy = "serve what it registered (`shoal models list`), or go on with it (resume=...)"
        raise RunError(f"run {run.id} is {run.status.value}: {remedy}")
    spec = ActorLearnerSpec.from_yaml(run.spec)
    experience, _ = look_at_environment(spec)
    factory, signature = served_model(spec, experience)
    source = RayWeightSource(start_weight_store(run.id))
    return ServedModel(spec.model_name, LiveModel(factory, signature, source))

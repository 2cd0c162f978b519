"""The policy of a run: its environment's spaces, and the model that represents it.

Used by the flow of a run, by its endpoint and by the registry; starts nothing, and holds nothing.
"""

from __future__ import annotations

import numpy as np
import yaml

import shoal.runs
from shoal.actor.environment import get_first_observation, make_environment
from shoal.actor.environment_loop import SegmentBuilder
from shoal.errors import ConfigError, InvalidSegment, SpecMismatch
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.registry import ModelFactory, Signature, TensorSignature
from shoal.rl.spec import RLSpec, experience_spec, network_kwargs
from shoal.runs import Run, Status
from shoal.wire import ExperienceSpec


def inspect_environment(spec: RLSpec) -> tuple[ExperienceSpec, np.ndarray]:
    """The format of its experience, and a first observation. Raises ConfigError for an environment that cannot be
    created or learned from; called before anything starts."""
    environment = make_environment(spec.env)
    experience = experience_spec(environment.observation_space, environment.action_space, spec)
    observation: np.ndarray = get_first_observation(environment, spec.env)
    environment.close()
    try:
        SegmentBuilder(experience).begin(observation)  # fails here as each actor would
    except InvalidSegment as error:
        problem = f"begins with what is not in its observation_space: {error.problem}"
        remedy = "give what the space says; reset returns (observation, info)"
        raise ConfigError("env", spec.env, problem, remedy) from None
    return experience, observation


def check(spec: ActorLearnerSpec) -> tuple[ExperienceSpec, np.ndarray]:
    """`inspect_environment`; raises ConfigError also if the resumed run's checkpoint does not fit, or the run has
    already reached its target. Called before anything starts, and before its record changes."""
    experience, observation = inspect_environment(spec)
    if spec.resume:
        run = shoal.runs.load(spec.resume)
        _require_unfinished(spec, run)
        _require_compatible_checkpoint(spec, experience, run)
    return experience, observation


def _require_unfinished(spec: ActorLearnerSpec, run: Run) -> None:
    if run.status is not Status.FINISHED or spec.target_return is None:  # without a target, there is its time again
        return
    asked, done = (yaml.safe_load(each) or {} for each in (spec.to_yaml(), run.spec))
    if asked | {"resume": ""} == done | {"resume": ""}:
        problem = f"has ended already, with the target_return of {spec.target_return:g} that is asked for"
        raise ConfigError("resume", run.id, problem, "say what it is to do now, as in target_return=490")


def _require_compatible_checkpoint(spec: ActorLearnerSpec, experience: ExperienceSpec, run: Run) -> None:
    if not any((run.folder / "checkpoints").glob("step-*")):
        return
    recorded = yaml.safe_load(run.spec) or {}  # of the environment and network; the endpoint's keys are masked
    before = RLSpec.parse({name: recorded[name] for name in RLSpec.model_fields if name in recorded})
    remedy = "leave it out, or begin a new run"
    if spec.hidden != before.hidden:
        raise SpecMismatch("hidden", list(spec.hidden), f"run {run.id} has learnt with {list(before.hidden)}", remedy)
    if spec.env != before.env:
        learnt, _ = inspect_environment(before)
        if describe_policy_model(spec, experience) != describe_policy_model(spec, learnt):
            problem = f"run {run.id} has learnt {before.env}, which shows or takes something else"
            raise SpecMismatch("env", spec.env, problem, remedy)


def describe_policy_model(spec: RLSpec, experience: ExperienceSpec) -> tuple[ModelFactory, Signature]:
    """The policy's factory, for the endpoint and the registry, and its signature."""
    kwargs = network_kwargs(spec, experience)
    size, num_actions = kwargs["observation_size"], kwargs["num_actions"]
    factory = ModelFactory(factory="shoal.models.actor_critic:ActorCritic", kwargs=kwargs)
    signature = Signature(
        inputs=[TensorSignature(name="observation", datatype="FP32", shape=[-1, size])],
        outputs=[
            TensorSignature(name="action", datatype="INT64", shape=[-1]),
            TensorSignature(name="logits", datatype="FP32", shape=[-1, num_actions]),
            TensorSignature(name="value", datatype="FP32", shape=[-1]),
        ],
    )
    return factory, signature

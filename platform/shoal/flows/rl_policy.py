"""The policy of a run as others see it: what its environment shows and takes, and the model that stands for it.

Asked by the flow of a run, by its endpoint and by the registry; starts nothing, and holds nothing.
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
    """What its experience looks like, and a first observation. Raises ConfigError for one that cannot be made or
    learned from; called before anything is started."""
    environment = make_environment(spec.env)
    experience = experience_spec(environment.observation_space, environment.action_space, spec)
    observation: np.ndarray = get_first_observation(environment, spec.env)
    environment.close()
    try:
        SegmentBuilder(experience).begin(observation)  # as each actor does, which would end here
    except InvalidSegment as error:
        problem = f"begins with what is not in its observation_space: {error.problem}"
        remedy = "give what the space says; reset returns (observation, info)"
        raise ConfigError("env", spec.env, problem, remedy) from None
    return experience, observation


def check(spec: ActorLearnerSpec) -> tuple[ExperienceSpec, np.ndarray]:
    """`inspect_environment`; raises ConfigError also when the run that is resumed has learnt something that does not
    fit, or has reached all that is asked for. Called before anything is started, and before its record is changed."""
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
    recorded = yaml.safe_load(run.spec) or {}  # of it, not the endpoint: its keys are masked
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
    """How the endpoint and the registry build the policy, and what it takes and gives."""
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

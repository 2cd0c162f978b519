"""The policy of a run: its environment's spaces, and the model that represents it.

Used by the flow of a run, by its endpoint and by the registry; starts nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import shoal.runs
from shoal.actor.agent_streams import is_parallel
from shoal.actor.environment import (
    ASK,
    check_step,
    get_spaces,
    has_environment,
    load_film_maker,
    open_environment,
    reset_environment,
)
from shoal.actor.other_games import find_flattened
from shoal.actor.segment_builder import SegmentBuilder
from shoal.cluster.job_main import ACTORS_INFERENCE
from shoal.errors import ConfigError, InvalidSegment, SpecMismatch
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.home import home
from shoal.registry import Criterion, ModelFactory, ModelVersion, Registry, Signature, TensorSignature
from shoal.registry.champion import CHAMPION
from shoal.registry.model_code import ModelCode
from shoal.rl.experience.demonstrations import DemonstrationSite
from shoal.rl.experience.segment_log import require_store
from shoal.rl.first_game import describe_given
from shoal.rl.gateway.listener import find_listener
from shoal.rl.gateway.remote_inference import require_remote_inference
from shoal.rl.gateway.sessions import LOCAL, REMOTE
from shoal.rl.gateway.shards import require_separable
from shoal.rl.spec import RLSpec, experience_spec, network_kwargs
from shoal.runs import Run, Status
from shoal.weights import WeightSnapshot, decode_tensors
from shoal.wire import ExperienceSpec, PolicySpec
from shoal.wire.action_masks import INFO_KEY, MASKS, find_choices, read_mask
from shoal.wire.experience_spec import EXPERIENCE_FILE


def describe_environment(
    spec: RLSpec, inference: str = LOCAL, agents: tuple[str, ...] = ()
) -> tuple[ExperienceSpec, np.ndarray]:
    """As `inspect_environment`, also of a run that has spaces alone, of which nothing is played."""
    if not spec.given:
        return inspect_environment(spec, inference, agents)
    experience, observation = describe_given(spec)
    return msgspec.structs.replace(experience, agents=agents), observation


def inspect_environment(
    spec: RLSpec, inference: str = LOCAL, agents: tuple[str, ...] = ()
) -> tuple[ExperienceSpec, np.ndarray]:
    """The format of its experience, and a first observation, by one reset and one step. agents: those with this policy,
    in a run of several. Raises ConfigError for an environment that cannot be created or learned from, or not with the
    actors' policy where `inference` says; called before anything starts."""
    with open_environment(spec.env, spec.ignore) as environment:
        if spec.self_play.is_on and not is_parallel(environment):
            problem, remedy = "has one agent, and self-play needs several", "leave out self_play"
            raise ConfigError("env", spec.env, problem, remedy)
        observation, info = reset_environment(environment, spec.env, agents)
        has_masks = INFO_KEY in info
        experience = experience_spec(*get_spaces(environment, spec.env, agents), spec, has_masks)
        experience = msgspec.structs.replace(experience, agents=agents, space=find_flattened(environment, agents))
        if inference == REMOTE:
            require_remote_inference(experience, spec.algorithm.pauses_actors)
        _require_good_beginning(spec.env, experience, observation, info)
        check_step(environment, spec.env, info)
    return experience, observation


def _require_good_beginning(
    env: str, experience: ExperienceSpec, observation: np.ndarray, info: Mapping[str, Any]
) -> None:
    """Raise ConfigError where each actor would fail with the first observation."""
    try:
        extras = {each.name: np.zeros(each.tensor.shape, each.tensor.numpy_dtype()) for each in experience.extras}
        SegmentBuilder(experience).begin(observation, extras)
        if choices := find_choices(experience):
            read_mask(info[INFO_KEY], choices)
    except InvalidSegment as error:
        what = "a wrong action_mask" if error.field == MASKS else "what is not in its observation_space"
        problem = f"begins with {what}: {error.problem}"
        remedy = "give what the space says; reset returns (observation, info)"
        raise ConfigError("env", env, problem, remedy) from None


def check(spec: ActorLearnerSpec) -> dict[str, tuple[ExperienceSpec, np.ndarray]]:
    """`inspect_environment` for each policy of a run, by its name; raises ConfigError also if the resumed run's
    checkpoint does not fit, or the run has already reached its target. Called before anything starts, and before its
    record changes."""
    spec = keep_spaces(spec)
    if not has_environment(spec.env):
        problem = f"needs an environment to play, and env={spec.env} has spaces alone"
        if ACTORS_INFERENCE in os.environ:
            raise ConfigError("--actors", "", problem, "leave it out, and let games join")
        for name in ("eval_episodes", "trial_episodes", "eval_timeout_s"):
            if name in spec.model_fields_set:
                remedy = "leave it out: target_return is of the games' own episodes"
                raise ConfigError(name, getattr(spec, name), problem, remedy)
    if spec.record_every:
        load_film_maker()
    if spec.env == ASK:
        return {}
    assigned = spec.assign_policies()
    if assigned and not spec.given:
        with open_environment(spec.env, spec.ignore) as environment:
            _require_assigned(spec, environment)
    run = shoal.runs.load(spec.resume) if spec.resume else None
    before = None if run is None else type(spec).from_record(run.spec, leave_out=["endpoint"])  # its keys are masked
    if run is not None and before is not None:
        _require_unfinished(spec, before, run)
    result = {}
    for name, own in spec.split_by_policy().items():
        agents = tuple(agent for agent, policy in assigned.items() if policy == name)
        experience, observation = describe_environment(own, os.environ.get(ACTORS_INFERENCE, LOCAL), agents)
        if own.action == "sampled" and not describe_policy_model(own, experience)[1].has_distribution:
            problem = f"{own.algorithm.name} learns no distribution of actions"
            raise ConfigError("action", own.action, problem, "use action=best, or algorithm=ppo")
        if own.learn_from_endpoint:
            _require_answerable(own, experience)
        require_playable_opponents(own, experience)
        require_separable(own)
        if own.gateway.durable == "store":
            require_store()
        find_listener(own.gateway)
        if run is None:  # a resumed one has copied them
            DemonstrationSite(own.demonstrations, experience, Path(), f"/{name}").check()
        checkpoints = None if run is None else run.folder / name / "checkpoints"
        if own.algorithm.disk_mb:
            require_disk_space(own.algorithm.disk_mb, None if checkpoints is None else checkpoints / "replay")
        if run is not None and before is not None and checkpoints is not None:
            earlier = before.split_by_policy().get(name)
            prefix = f"policies.{name}." if name else ""
            if earlier is None or before.assign_policies() != assigned:
                problem = f"run {run.id} began with {before.assign_policies()}"
                raise SpecMismatch(f"{prefix}agents", list(agents), problem, "leave it out, or begin a new run")
            _require_same_opponents(own, earlier, run.id, prefix)
            if any(checkpoints.glob("step-*")):
                _require_compatible_checkpoint(own, earlier, experience, run.id, prefix)
        result[name] = experience, observation
    return result


def keep_spaces(spec: ActorLearnerSpec) -> ActorLearnerSpec:
    """The spec of a run that asks for its spaces, with those that it has got before it was resumed."""
    if spec.env != ASK or not spec.resume:
        return spec
    before = type(spec).from_record(shoal.runs.load(spec.resume).spec, leave_out=["endpoint"])
    return spec.update({"env": before.env}) if before.given else spec


def _require_assigned(spec: ActorLearnerSpec, environment: Any) -> None:
    """Raise ConfigError unless each agent of the environment has a policy, and each policy's agents are there."""
    if not is_parallel(environment):
        raise ConfigError("env", spec.env, "has one agent", "use a job of one policy, as jobs/actor_learner.py")
    agents, assigned = list(environment.possible_agents), spec.assign_policies()
    for agent, name in assigned.items():
        if agent not in agents:
            problem, remedy = f"{spec.env} has no such agent", f"its agents are {', '.join(agents)}"
            raise ConfigError(f"policies.{name}.agents", agent, problem, remedy)
    if missing := [agent for agent in agents if agent not in assigned]:
        problem = f"gives no policy to {' and '.join(missing)} of {spec.env}"
        policies = list(spec.split_by_policy())
        raise ConfigError("policies", policies, problem, f"add policies.NAME.agents=[{', '.join(missing)}]")


def _require_answerable(spec: ActorLearnerSpec, experience: ExperienceSpec) -> None:
    """Raise ConfigError for a run whose gateway cannot act for users."""
    if spec.algorithm.pauses_actors:
        remedy = "leave it out, or use an algorithm that does not pause its actors"
        raise ConfigError("learn_from_endpoint", True, f"{spec.algorithm.name} pauses actors, not users", remedy)
    if experience.self_play:
        problem = "is for one agent, and self-play has several"
        raise ConfigError("learn_from_endpoint", True, problem, "leave out self_play")
    if any(each.per == "observation" for each in experience.extras):
        problem = "an endpoint's users give no action masks"
        raise ConfigError("learn_from_endpoint", True, problem, "leave it out, or learn from actors")


def require_playable_opponents(spec: RLSpec, experience: ExperienceSpec) -> None:
    """Raise ConfigError unless the registered opponents have the network of this run, whose actors play them."""
    if not spec.self_play.opponents:
        return
    ignored = {"code", "action"}  # actors compute the weights themselves
    wanted = describe_policy_model(spec, experience)[0].model_dump(mode="json", exclude=ignored)
    for reference in spec.self_play.opponents:
        result = Registry().get(reference)
        model = result.manifest.model.model_dump(mode="json", exclude=ignored)
        if model != wanted:
            before, now = ({"factory": each["factory"], **each["kwargs"]} for each in (model, wanted))
            differing = [name for name in {**now, **before} if before.get(name) != now.get(name)]
            has = ", ".join(f"{name} = {str(before.get(name))[:80]}" for name in differing)
            problem = f"{result.ref} has another network than this run: {has or model['format']}"
            raise ConfigError("self_play.opponents", reference, problem, "leave it out, or train with the same network")


def _require_same_opponents(spec: RLSpec, before: RLSpec, run_id: str, prefix: str = "") -> None:
    """Raise SpecMismatch unless a resumed run has the registered opponents that it began with."""
    began = list(before.self_play.opponents)
    if began != list(spec.self_play.opponents):
        problem = f"run {run_id} began with {began}, by whose number its versions are counted"
        field = f"{prefix}opponents" if prefix else "self_play.opponents"
        raise SpecMismatch(field, list(spec.self_play.opponents), problem, "give the same")


def require_disk_space(needed_mb: float, existing: Path | None) -> None:
    """Raise ConfigError when the replay does not fit the disk of the runs' record. existing: its folder, if resumed"""
    files = existing.iterdir() if existing is not None and existing.is_dir() else ()
    free_mb = (shutil.disk_usage(home()).free + sum(path.stat().st_size for path in files)) / 2**20
    if needed_mb > free_mb:
        problem = f"is larger than the {free_mb:,.0f} MiB that are free in {home()}"
        remedy = "lower it, set $SHOAL_HOME to a larger disk, or use algorithm.replay_on_disk=false"
        raise ConfigError("algorithm.replay_mb", needed_mb, problem, remedy)


def _require_unfinished(spec: ActorLearnerSpec, before: ActorLearnerSpec, run: Run) -> None:
    if run.status is not Status.FINISHED or spec.target_return is None:  # without a target, there is its time again
        return
    names = type(spec).model_fields.keys() - {"endpoint", "resume"}
    if all(getattr(spec, name) == getattr(before, name) for name in names):
        problem = f"has ended already, with the target_return of {spec.target_return:g} that is asked for"
        raise ConfigError("resume", run.id, problem, "say what it is to do now, as in target_return=490")


def _require_compatible_checkpoint(
    spec: ActorLearnerSpec, before: ActorLearnerSpec, experience: ExperienceSpec, run_id: str, prefix: str
) -> None:
    """Raise SpecMismatch for a spec whose learner cannot go on with what `before` has learnt."""
    remedy = "leave it out, or begin a new run"

    def refuse(field: str, value: object, learnt: str) -> SpecMismatch:
        return SpecMismatch(f"{prefix}{field}", value, f"run {run_id} has learnt {learnt}", remedy)

    if spec.hidden != before.hidden:
        raise refuse("hidden", list(spec.hidden), f"with {list(before.hidden)}")
    models = [each.model.word if each.model is not None else "" for each in (spec, before)]
    if models[0] != models[1]:
        raise refuse("model", models[0], f"with {models[1] or 'layers of ours'}")
    cores = [
        each.applied_core + (f" of {each.core_size}" if each.applied_core != "none" else "") for each in (spec, before)
    ]
    if cores[0] != cores[1] and (spec.core, spec.core_size) != (before.core, before.core_size):
        raise refuse("core", cores[0], f"with {cores[1]}")
    networks = [
        (each.model_factory, each.algorithm.get_model_options(), core)
        for each, core in zip((spec, before), cores, strict=True)
    ]
    if networks[0] != networks[1]:
        raise refuse("algorithm", spec.algorithm.name, f"with another network, by {before.algorithm}")
    for name in ("normalize_observations", "normalize_rewards"):
        if getattr(spec, name) != getattr(before, name):
            raise refuse(name, getattr(spec, name), f"with {str(getattr(before, name)).lower()}")
    if (spec.env, spec.ignore) != (before.env, before.ignore):
        learnt, _ = describe_environment(before, agents=experience.agents)
        if describe_policy_model(spec, experience) != describe_policy_model(spec, learnt):
            raise refuse("env", spec.env, f"{before.env}, which shows or takes something else")


def describe_policy_model(spec: RLSpec, experience: ExperienceSpec) -> tuple[ModelFactory, Signature]:
    """The policy's factory, for the endpoint and the registry, and its signature."""
    kwargs = network_kwargs(spec, experience)
    num_actions = kwargs["num_actions"]
    factory = ModelFactory(factory=spec.model_factory, kwargs=kwargs)
    action = TensorSignature(name="action", datatype="INT64", shape=[-1, *experience.action.shape])
    parameters = [spec.algorithm.score_output]
    if experience.policy.action_low:
        action = describe_numbers("action", *experience.action.shape)
        parameters = ["mean", "log_std"]
    state = [spec.state_size] if spec.state_size else []
    signature = Signature(
        inputs=[
            describe_numbers("observation", *experience.observation.shape),
            *[describe_numbers("state", size) for size in state],
            *[TensorSignature(name=INFO_KEY, datatype="BOOL", shape=[-1, num_actions])]
            * bool(find_choices(experience)),
        ],
        outputs=[
            action,
            *[describe_numbers(name, num_actions) for name in parameters],
            *([describe_numbers("value")] if spec.algorithm.has_value else []),
            *[describe_numbers("next_state", size) for size in state],
        ],
    )
    return factory, signature


def describe_numbers(name: str, *shape: int) -> TensorSignature:
    """A tensor of floats with rows of this shape."""
    return TensorSignature(name=name, datatype="FP32", shape=[-1, *shape])


def list_actions(spec: ActorLearnerSpec, experience: ExperienceSpec) -> tuple[str, ...]:
    """How the candidates may act, in the order of trials: as the run says, or by best actions, and then sampled."""
    _, signature = describe_policy_model(spec, experience)
    if spec.action == "best" or not signature.has_distribution:
        return ("best",)
    return ("best", "sampled") if spec.action is None else ("sampled",)


def mix_policies(
    factory: ModelFactory, signature: Signature, members: Sequence[WeightSnapshot]
) -> tuple[ModelFactory, Signature, WeightSnapshot]:
    """A PolicyMixture of these versions of a policy, which has a state: the member of the episode, and its state."""
    states = {"state", "next_state"}
    size = 1 + sum(each.shape[1] for each in signature.inputs if each.name in states)
    inputs, outputs = (
        [each for each in side if each.name not in states] for side in (signature.inputs, signature.outputs)
    )
    inputs.insert(1, describe_numbers("state", size))
    outputs.append(describe_numbers("next_state", size))
    network = factory.model_dump(include={"factory", "kwargs", "code"}, exclude_none=True)
    mixed = ModelFactory(
        factory="shoal.models.policy_mixture:PolicyMixture",
        kwargs={"network": network, "num_members": len(members)},
        action=factory.action,
    )
    weights = {
        f"members.{index}.{name}": each
        for index, member in enumerate(members)
        for name, each in decode_tensors(member.payload).items()
    }
    return mixed, Signature(inputs=inputs, outputs=outputs), WeightSnapshot.of(members[-1].version, weights)


def describe_experience(experience: ExperienceSpec, is_mixed: bool = False) -> dict[str, bytes]:
    """The file of a registered policy by which `shoal.load` acts: what the game shows and takes, and how actors compute
    the policy. is_mixed: a mixture, which actors do not compute."""
    if is_mixed:
        experience = msgspec.structs.replace(experience, policy=PolicySpec("", "", ()))
    return {EXPERIENCE_FILE: msgspec.json.encode(experience)}


def register_policy(
    spec: ActorLearnerSpec,
    experience: ExperienceSpec,
    snapshot: WeightSnapshot,
    run_id: str,
    gateway_stats: Mapping[str, Any],
    action: str = "best",
    pool: Sequence[WeightSnapshot] = (),
    code: ModelCode | None = None,
) -> ModelVersion:
    """Register these weights as a version of the run's model, under its aliases.

    gateway_stats: its counts, and the `trial_return`, if it had a trial
    action: best or sampled
    pool:   register an equal mixture of these versions instead
    code:   of the user's network; None: as it lies here now
    """
    factory, signature = describe_policy_model(spec, experience)
    factory = factory.update({"action": action}).model_copy(update={"code": code})
    if pool:
        factory, signature, snapshot = mix_policies(factory, signature, pool)
    metrics = {"mean_return_100": float(gateway_stats["mean_return"]), "steps": float(gateway_stats["steps"])}
    has_trial = "trial_return" in gateway_stats
    if has_trial:
        metrics["mean_return"] = float(gateway_stats["trial_return"])
    # Against others the return says as much about them: then the newest version is the champion.
    criterion = Criterion("mean_return", is_higher_better=True) if has_trial and not spec.self_play.is_on else None
    return Registry().register(
        spec.model_name,
        snapshot,
        model=factory,
        signature=signature,
        run_id=run_id,
        metrics=metrics,
        files=describe_experience(experience, is_mixed=bool(pool)),
        data={"environment": spec.env},
        aliases=[CHAMPION] if criterion is None and spec.aliases is None else spec.aliases,
        criterion=criterion,
    )

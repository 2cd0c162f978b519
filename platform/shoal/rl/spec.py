"""The spec of a reinforcement-learning run, and the format of its experience.

Called by jobs, by `local_loop.py` and by the Ray workers. Knows the environment only through its two spaces.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from pydantic import BeforeValidator, Field

from shoal.actor.environment import get_action_bounds, get_action_sizes, parse_environment
from shoal.config import Spec
from shoal.errors import ConfigError
from shoal.models.network_source import AnyNetworkSource
from shoal.plugins.find import load_reference
from shoal.rl.algorithm_config import AnyAlgorithmConfig, find_fitting
from shoal.rl.part_specs import DemonstrationsSpec, GatewaySpec, LearnerSpec, SelfPlaySpec, Setting, SettingsRule
from shoal.runs.formatting import Duration
from shoal.runs.json_lines import LogFormat
from shoal.runs.tracker import TrackerNames
from shoal.wire.action_masks import INFO_KEY, describe_masks
from shoal.wire.experience_spec import DTYPES, STATE, ConvolutionSpec, ExperienceSpec, ExtraSpec, PolicySpec, TensorSpec
from shoal.wire.segment import largest_segment_bytes

CORE_TENSORS = tuple(f"core.rnn.{name}_l0" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
LEAST_CAPACITY = 96
LARGEST_GRU_STATE = 1.001  # |h| ≤ 1, with a margin for rounding


Environment = Annotated[str, BeforeValidator(parse_environment)]


class RLSpec(Spec):
    """One actor-learner run."""

    env: Environment = Field(
        default="CartPole-v1",
        description="a gymnasium id, module:function, or spaces alone: a YAML file or {observation: [4], action: 3};"
        " ask: those of the first game that joins",
    )
    ignore: tuple[str, ...] = Field(default=(), description="parts of a Dict that are not observed, by name")
    model: AnyNetworkSource = Field(default=None, description="my_net.py:Net, a network of your own")
    hidden: tuple[Annotated[int, Field(ge=1)], ...] = (64, 64)
    core: Literal["none", "gru", "lstm"] | None = Field(
        default=None, description="a recurrent layer in the network; default: the algorithm's"
    )
    core_size: int = Field(default=64, ge=1, description="outputs of the core")
    normalize_observations: bool = Field(default=False, description="by running means and deviations; not frames")
    normalize_rewards: bool | None = Field(
        default=None, description="by the deviation of their discounted sums; default: the algorithm's"
    )
    wait: Duration | None = Field(
        default=None,
        description="for the places of learners and replicas, as 30m; default: 30m where an autoscaler may add nodes, "
        "10m where other runs are on, else 10 s",
    )
    priority: int = Field(
        default=0, description="of the runs that wait for places, those with a higher one start first"
    )
    logs: LogFormat = Field(default="text", description="of the driver and the workers")
    track: TrackerNames = Field(default=(), description="where its record is mirrored to: mlflow, wandb, trackio")
    segment_length: int | None = Field(
        default=None, ge=1, description="environment steps in a segment, at most; default: the algorithm's"
    )
    gateway: GatewaySpec = GatewaySpec()
    learn_from_endpoint: bool = Field(default=False, description="from users of the endpoint, who act and reward")
    settings: dict[str, Setting] = Field(
        default={}, description="that the games are told, as settings.gravity=9; `shoal set` changes them"
    )
    rules: tuple[SettingsRule, ...] = Field(
        default=(), description="by which they change, one after the other: [{above: 100, set: {gravity: 12}}]"
    )
    learner: LearnerSpec = LearnerSpec()
    self_play: SelfPlaySpec = SelfPlaySpec()
    demonstrations: DemonstrationsSpec = DemonstrationsSpec()
    algorithm: AnyAlgorithmConfig = Field(default={"name": "ppo"}, validate_default=True)

    @property
    def batch_limits(self) -> tuple[int, int]:
        """Environment steps in a batch, at least and at most."""
        least = self.learner.batch_steps or self.algorithm.batch_steps
        most = self.learner.max_batch_steps or max(least, self.algorithm.batch_growth * self.algorithm.batch_steps)
        return min(least, most), most

    @property
    def queue_capacity(self) -> int:
        """Segments that the queue may have: by default those of twice `steps_ahead`, even if each has a single step."""
        return self.gateway.queue_capacity or max(LEAST_CAPACITY, 2 * self.steps_ahead)

    @property
    def steps_ahead(self) -> int:
        """Environment steps that may be queued and on their way while the learner learns, and twice as many while it
        waits: those of a batch. 0: `gateway.queue_capacity` says how many segments."""
        return 0 if self.gateway.queue_capacity else self.batch_limits[0]

    @property
    def given(self) -> dict[str, Any]:
        """The spaces of a run without an environment, as they were written; empty in another run."""
        return json.loads(self.env) if self.env.startswith("{") else {}

    @property
    def applied_core(self) -> str:
        return self.core or self.algorithm.cores[0]

    @property
    def has_normalized_rewards(self) -> bool:
        return self.algorithm.normalize_rewards if self.normalize_rewards is None else self.normalize_rewards

    @property
    def model_factory(self) -> str:
        """The factory of the model that learner, endpoint and registry build."""
        return self.algorithm.model_factory if self.applied_core == "none" else self.algorithm.recurrent_factory

    @property
    def state_size(self) -> int:
        """Numbers in the recurrent state of an episode; 0 without a core."""
        return {"none": 0, "gru": self.core_size, "lstm": 2 * self.core_size}[self.applied_core]

    @property
    def take_timeout_s(self) -> float:
        """How long the learner waits for a full batch."""
        return self.learner.take_timeout_s or self.algorithm.take_timeout_s

    @property
    def publish_interval_s(self) -> float:
        """Between two weight versions, at least; 0 where actors wait for each."""
        return 0.0 if self.algorithm.pauses_actors else self.learner.publish_interval_s

    @property
    def applied_gateway(self) -> GatewaySpec:
        """The gateway's settings, as this algorithm needs them."""
        lag = self.algorithm.limit_version_lag(self.gateway.max_version_lag)
        return self.gateway.model_copy(update={"max_version_lag": lag})


def experience_spec(observation_space: Any, action_space: Any, spec: RLSpec, has_masks: bool = False) -> ExperienceSpec:
    """The format of segments of an environment with these gymnasium spaces. has_masks: it gives action masks.

    Raises ConfigError for spaces that the algorithm cannot learn from, and for segments too large for a message.
    """
    shape = observation_space.shape
    is_box = type(observation_space).__name__ == "Box" and len(shape) > 0 and 0 not in shape
    is_frame = is_box and len(shape) == 3 and spec.model is None
    if not (is_box and (len(shape) == 1 or is_frame or spec.model is not None)):
        remedy = "this algorithm needs a flat Box: gymnasium.wrappers.FlattenObservation makes one of most spaces"
        remedy += "; a network of your own takes a Box of any rank: model=my_net.py:Net" if is_box else ""
        raise ConfigError("env", spec.env, f"observes {observation_space}", remedy)
    if spec.normalize_observations and is_frame:
        problem = f"is for numbers, and {spec.env} observes frames, which are scaled to [0, 1]"
        raise ConfigError("normalize_observations", True, problem, "leave it out")
    dtype = np.dtype(observation_space.dtype).name
    if dtype not in DTYPES:
        problem, remedy = f"observes {dtype}, which cannot travel", f"wrap it; these can: {', '.join(DTYPES)}"
        raise ConfigError("env", spec.env, problem, remedy)
    low, high = float(np.min(observation_space.low)), float(np.max(observation_space.high))
    observation = TensorSpec(
        dtype, tuple(observation_space.shape), low if np.isfinite(low) else None, high if np.isfinite(high) else None
    )
    action, bounds = describe_actions(action_space, spec)
    policy = spec.algorithm.describe_policy(spec.hidden) or policy_spec(
        spec.hidden, is_continuous="action_low" in bounds, has_core=spec.applied_core != "none"
    )
    policy = msgspec.structs.replace(policy, **bounds, **(describe_convolutions(observation) if is_frame else {}))
    policy, extras = add_core(policy, spec)
    if has_masks:
        if policy.action_low:
            problem = (
                f"gives an {INFO_KEY}, and acts with {action_space}: masks are for choices, not for continuous actions"
            )
            remedy = (
                f"leave {INFO_KEY} out, or act with a Discrete or a MultiDiscrete: every algorithm but sac takes masks"
            )
            raise ConfigError("env", spec.env, problem, remedy)
        extras += (describe_masks(action, policy.action_sizes),)
    length = spec.segment_length or spec.algorithm.segment_length
    experience = ExperienceSpec(observation, action, length, policy, extras, spec.self_play.is_on)
    if spec.model is not None:
        experience = msgspec.structs.replace(experience, policy=describe_graph(spec, spec.model.word, experience))
    require_segment_fits(spec.gateway, experience)
    return experience


def describe_graph(spec: RLSpec, reference: str, experience: ExperienceSpec) -> PolicySpec:
    """The policy by a network of the user's own: as ours, with a graph in place of layers.

    Raises ConfigError for a network that does not keep its contract, or that actors could not compute.
    """
    from shoal.rl.policy_graph import export_policy  # it imports torch, which other runs need not

    policy = experience.policy
    if spec.applied_core != "none":
        fitting = " or algorithm=".join(find_fitting(lambda config: "none" in config.cores))
        problem = "has no place for a recurrent core"
        raise ConfigError("model", reference, problem, f"core=none, and algorithm={fitting}")
    kwargs = network_kwargs(spec, experience)
    model = load_reference(spec.algorithm.model_factory)(**kwargs)
    num_outputs = kwargs["num_actions"] * (2 if policy.action_low else 1)
    return msgspec.structs.replace(
        policy,
        kind=policy.kind.replace("mlp_", "graph_"),
        activation="",
        layers=(),
        log_std="",
        graph=export_policy(model, experience.observation, num_outputs, reference),
    )


def describe_actions(space: Any, spec: RLSpec) -> tuple[TensorSpec, dict[str, Any]]:
    """One action of a gymnasium space, and what the policy knows of its numbers: a Box's bounds, the sizes of choices.

    Raises ConfigError.
    """
    kind, algorithm = type(space).__name__, spec.algorithm
    if kind not in algorithm.action_spaces:
        fitting = find_fitting(lambda config: kind in config.action_spaces)
        remedy = f"algorithm={' or algorithm='.join(fitting)}" if fitting else "wrap the environment"
        problem = f"acts with {space}; {algorithm.name} needs a {' or a '.join(algorithm.action_spaces)} action space"
        raise ConfigError("env", spec.env, problem, remedy)
    if kind == "Discrete":
        if space.start != 0:
            problem = f"acts with {space}, which starts at {space.start}"
            raise ConfigError("env", spec.env, problem, "actions count from 0: wrap the environment")
        return TensorSpec("int64", (), 0, int(space.n) - 1), {}
    if kind != "Box":
        sizes = get_action_sizes(space)
        if not sizes:
            raise ConfigError("env", spec.env, f"acts with {space}", "actions count from 0: wrap the environment")
        action = TensorSpec(np.dtype(space.dtype).name, tuple(space.shape), 0, max(sizes) - 1)
        return action, {"kind": "mlp_multi_categorical", "action_sizes": sizes}
    low, high = np.asarray(space.low), np.asarray(space.high)
    if low.dtype.kind != "f" or not low.size or not (np.isfinite(low) & np.isfinite(high) & (low < high)).all():
        problem = f"acts with {space}: each number of a Box needs to be a float with finite bounds, low < high"
        raise ConfigError("env", spec.env, problem, "wrap it in gymnasium.wrappers.RescaleAction, for instance")
    lows, highs = get_action_bounds(space)
    action = TensorSpec("float32", tuple(space.shape), min(lows), max(highs))
    return action, {"action_low": lows, "action_high": highs}


def add_core(policy: PolicySpec, spec: RLSpec) -> tuple[PolicySpec, tuple[ExtraSpec, ...]]:
    """The policy with the run's recurrent core, if it has one, and the state that segments carry for it.

    Raises ConfigError for a core that the algorithm does not take.
    """
    core, cores = spec.applied_core, spec.algorithm.cores
    if core not in cores:
        fitting = find_fitting(lambda config: core in config.cores)
        problem = f"is not for {spec.algorithm.name}, whose core is {' or '.join(cores)}"
        raise ConfigError("core", core, problem, f"algorithm={' or algorithm='.join(fitting)}")
    if core == "none":
        return policy, ()
    limit = LARGEST_GRU_STATE if core == "gru" else None
    state = TensorSpec("float32", (spec.state_size,), None if limit is None else -limit, limit)
    kind = "recurrent_" + policy.kind.removeprefix("mlp_")
    policy = msgspec.structs.replace(policy, kind=kind, core=core, core_tensors=CORE_TENSORS)
    return policy, (ExtraSpec(STATE, state, "segment"),)


def plan_convolutions(shape: tuple[int, ...]) -> list[tuple[int, int, bool]]:
    """Plan a FrameEncoder: of each layer, output channels, stride, whether it is residual. [H, W, C] or [C, H, W].

    Halves the frame until no side is above 11, each time with a residual layer after it.
    """
    size = max(shape[:2] if has_channels_last(shape) else shape[1:])
    layers: list[tuple[int, int, bool]] = [] if size > 11 else [(16, 1, False), (16, 1, True)]
    while size > 11:
        channels = 16 if not layers else 32
        layers += [(channels, 2, False), (channels, 1, True)]
        size //= 2
    return layers


def has_channels_last(shape: tuple[int, ...]) -> bool:
    """Whether a frame is [H, W, C]: the channels are the fewest; in doubt, the last axis."""
    return shape[2] <= shape[0]


def describe_convolutions(observation: TensorSpec) -> dict[str, Any]:
    """The fields of the policy of an ActorCritic over these frames."""
    layers = plan_convolutions(observation.shape)
    return {
        "convolutions": tuple(
            ConvolutionSpec(f"encoder.layers.{index}.weight", f"encoder.layers.{index}.bias", stride, is_residual)
            for index, (_, stride, is_residual) in enumerate(layers)
        ),
        "channels_last": has_channels_last(observation.shape),
        "observation_scale": 1 / (observation.high or 255) if observation.dtype == "uint8" else 1.0,
    }


def describe_encoder(observation: TensorSpec) -> dict[str, Any]:
    """The constructor arguments of a FrameEncoder over these frames."""
    policy = describe_convolutions(observation)
    return {
        "shape": list(observation.shape),
        "channels_last": policy["channels_last"],
        "scale": policy["observation_scale"],
        "convolutions": plan_convolutions(observation.shape),
    }


def require_segment_fits(gateway: GatewaySpec, experience: ExperienceSpec) -> None:
    """Raise ConfigError when the longest segment exceeds the message limit."""
    largest = largest_segment_bytes(experience)
    if largest > gateway.max_message_bytes:
        remedy = "shorten segment_length, or raise it"
        problem = f"is below the {largest} bytes of the longest segment"
        raise ConfigError("gateway.max_message_bytes", gateway.max_message_bytes, problem, remedy)


def network_kwargs(spec: RLSpec, experience: ExperienceSpec) -> dict[str, Any]:
    """The constructor arguments of this run's model, for the learner, the endpoint and later loaders."""
    action = experience.action
    policy = experience.policy
    bounds = dict[str, Any]()
    num_actions = int(action.high or 0) + 1
    if policy.action_sizes:
        num_actions = sum(policy.action_sizes)
        bounds.update(action_sizes=list(policy.action_sizes), action_shape=list(action.shape))
    if policy.action_low:
        num_actions = len(policy.action_low)
        for name in ("action_low", "action_high"):
            bounds[name] = np.reshape(getattr(policy, name), action.shape).tolist()
    shape = experience.observation.shape
    sizes = {"observation_size": math.prod(shape), "num_actions": num_actions, "hidden": list(spec.hidden)}
    if policy.convolutions:
        bounds["frames"] = describe_encoder(experience.observation)
    if spec.model is not None:
        outputs = {"is_gaussian": bool(policy.action_low), "has_value": spec.algorithm.has_value_head}
        outputs |= {"is_normalized": True} if spec.normalize_observations else {}
        bounds["network"] = {**spec.model.model_dump(), **sizes, "observation_shape": list(shape), **outputs}
    if spec.applied_core != "none":
        bounds.update(core=spec.applied_core, core_size=spec.core_size)
    return {**sizes, **bounds, **spec.algorithm.get_model_options()}


def policy_spec(hidden: Sequence[int], is_continuous: bool = False, has_core: bool = False) -> PolicySpec:
    """How an actor runs the policy of an ActorCritic with these hidden layers, or of a RecurrentActorCritic, whose core
    `add_core` describes; of a Box's, without its bounds."""
    trunk = [f"trunk.{2 * i}" for i in range(len(hidden) - 1)] if has_core else []
    prefix = "head." if has_core else ""
    names = [*trunk, *(f"{prefix}policy.{2 * i}" for i in range(len(hidden) - len(trunk) + 1))]
    layers = tuple((f"{name}.weight", f"{name}.bias") for name in names)
    if is_continuous:
        log_std = f"{prefix}log_std"
        return PolicySpec("mlp_squashed_gaussian", "tanh", layers, log_std=log_std, core_position=len(trunk))
    return PolicySpec("mlp_categorical", "tanh", layers, core_position=len(trunk))

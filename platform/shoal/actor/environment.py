"""Create a run's environment, with one-line errors. For actors, and for checks of a run."""

from __future__ import annotations

import importlib
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from shoal.actor.agent_streams import is_parallel
from shoal.errors import ConfigError, ShoalError
from shoal.wire import ExperienceSpec
from shoal.wire.action_masks import INFO_KEY

MAX_TURNS = 100  # until it is an agent's turn for the first time
# Observations that make_environment flattens to one array, as gymnasium.spaces.flatten does: parts in the
# order of the space, choices as one-hot vectors.
FLATTENED = ("Dict", "Tuple", "Discrete", "MultiDiscrete", "MultiBinary")


def make_environment(name: str) -> Any:
    """The environment of a gymnasium id; `module:Id` imports the module first. `module:function` calls the function,
    which returns an environment of one agent or of several (`agent_streams`). Raises ConfigError.

    Observations of a Dict, a Tuple, or of integers that are no Box become a flat Box; those of booleans become bytes.
    A Dict's "action_mask" moves to info. The same holds for each of several agents.
    """
    if (function := _find_function(name)) is not None:
        with translate_environment_errors(name):
            made = function()
        if not all(callable(getattr(made, method, None)) for method in ("reset", "step")):
            problem = f"returned a {type(made).__name__}, which has no reset and step"
            raise ConfigError("env", name, problem, "return an environment")
        with translate_environment_errors(name):
            return _flatten_agents(made) if is_parallel(made) else _flatten(made) if _is_gymnasiums(made) else made
    try:
        import gymnasium
    except ImportError:
        raise ConfigError(
            "env", name, "needs gymnasium", "pip install 'CHECKOUT[gym]', with the folder of Shoal's sources"
        ) from None
    module = name.partition(":")[0]
    with translate_environment_errors(name):
        try:
            return _flatten(gymnasium.make(name))
        except gymnasium.error.DependencyNotInstalled as error:
            remedy = "install what it names"
            if "box2d" in str(error):
                remedy = "pip install 'CHECKOUT[box2d]', with the folder of Shoal's sources"
            raise ConfigError("env", name, f"cannot be made: {error}", remedy) from None
        except gymnasium.error.Error as error:
            remedy = "name one that gymnasium knows, module:Id to import module first, or module:function"
            raise ConfigError("env", name, f"cannot be made: {error}", remedy) from None
        except ModuleNotFoundError as error:
            missing = getattr(error.__cause__ or error, "name", None)  # gymnasium wraps it
            if missing not in (None, module.partition(".")[0], module):
                raise  # what the module itself imports
            problem = f"there is no module {module!r} in {os.getcwd()}, and none is installed"
            remedy = "run it in the folder that holds the module, or name that in PYTHONPATH"
            raise ConfigError("env", name, problem, remedy) from None


@contextmanager
def open_environment(name: str) -> Iterator[Any]:
    """`make_environment`, closed at the end if it can be closed."""
    environment = make_environment(name)
    try:
        yield environment
    finally:
        getattr(environment, "close", lambda: None)()


def _is_gymnasiums(environment: Any) -> bool:
    """Whether gymnasium's wrappers take it."""
    gymnasium = sys.modules.get("gymnasium")
    return gymnasium is not None and isinstance(environment, gymnasium.Env)


def _flatten(environment: Any) -> Any:
    """A gymnasium environment whose observations are a Box, and whose action mask is in info."""
    import gymnasium

    if _has_mask(environment.observation_space):
        environment = _separate_mask(environment)
    space = environment.observation_space
    if type(space).__name__ in FLATTENED:
        environment = gymnasium.wrappers.FlattenObservation(environment)
    elif space.dtype == np.bool_:
        space = gymnasium.spaces.Box(0, 1, space.shape, np.uint8)
        environment = gymnasium.wrappers.TransformObservation(environment, _to_bytes, space)
    return environment


def _flatten_agents(environment: Any) -> Any:
    """The same of an environment of several agents, by PettingZoo's methods."""
    spaces = {agent: environment.observation_space(agent) for agent in environment.possible_agents}
    if all(type(space).__name__ not in FLATTENED and space.dtype != np.bool_ for space in spaces.values()):
        return environment
    return _FlatAgents(environment, spaces)


class _FlatAgents:
    """An environment of several agents, of which `spaces` are the observations, with flat ones and masks in infos."""

    def __init__(self, environment: Any, spaces: Mapping[str, Any]) -> None:
        self._environment, self._spaces = environment, spaces

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    def observation_space(self, agent: str) -> Any:
        import gymnasium

        space = self._spaces[agent]
        space = _find_other_parts(space) if _has_mask(space) else space
        if type(space).__name__ in FLATTENED:
            return gymnasium.spaces.flatten_space(space)
        return gymnasium.spaces.Box(0, 1, space.shape, np.uint8) if space.dtype == np.bool_ else space

    def reset(self, seed: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        return self._flatten(*self._environment.reset(seed=seed))

    def step(self, actions: Mapping[str, Any]) -> tuple[Any, ...]:
        observations, *outcome, infos = self._environment.step(actions)
        observations, infos = self._flatten(observations, infos)
        return observations, *outcome, infos

    def _flatten(
        self, observations: Mapping[str, Any], infos: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        import gymnasium

        flat, found = dict(observations), dict(infos)
        for agent, observation in observations.items():
            space = self._spaces[agent]
            if _has_mask(space):
                found[agent] = {**found.get(agent, {}), INFO_KEY: observation[INFO_KEY]}
                observation, space = _select_parts(observation, space), _find_other_parts(space)
            if type(space).__name__ in FLATTENED:
                observation = gymnasium.spaces.flatten(space, observation)
            flat[agent] = _to_bytes(np.asarray(observation)) if space.dtype == np.bool_ else observation
        return flat, found


def _to_bytes(observation: np.ndarray) -> np.ndarray:
    return observation.astype(np.uint8)


def _find_function(name: str) -> Callable[[], Any] | None:
    """The function that `module:function` names, if there is one: otherwise it is an id for gymnasium."""
    module, _, attribute = name.partition(":")
    if not attribute.isidentifier():
        return None
    with translate_environment_errors(name):
        try:
            found = getattr(importlib.import_module(module), attribute, None)
        except ModuleNotFoundError as error:
            if error.name not in (module, module.partition(".")[0]):
                raise  # what the module itself imports
            return None
    return found if callable(found) else None


def get_spaces(environment: Any, name: str, agents: Sequence[str] = ()) -> tuple[Any, Any]:
    """The spaces of its observations and its actions; of several agents, those that all of them have. agents: those
    with the policy in question, in a run of several. Raises ConfigError."""
    if not is_parallel(environment):
        return environment.observation_space, environment.action_space
    with translate_environment_errors(name):
        agents = agents or list(environment.possible_agents)
        spaces = [(environment.observation_space(agent), environment.action_space(agent)) for agent in agents]
    for agent, each in zip(agents, spaces, strict=True):
        if each != spaces[0]:
            problem = f"gives {agent} other spaces than {agents[0]}: {each} and {spaces[0]}"
            remedy = "pad them to the same, since they have one policy; or give them several: jobs/tag.py"
            raise ConfigError("env", name, problem, remedy)
    return spaces[0]


def _separate_mask(environment: Any) -> Any:
    """The environment with the "action_mask" of its Dict observations in info, and the other parts as observations."""
    import gymnasium

    space = environment.observation_space

    class SeparateMask(gymnasium.Wrapper):  # type: ignore[misc]
        def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
            return self._split(*self.env.reset(**options))

        def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
            observation, reward, terminated, truncated, info = self.env.step(action)
            observation, info = self._split(observation, info)
            return observation, reward, terminated, truncated, info

        def _split(self, observation: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return _select_parts(observation, space), {**info, INFO_KEY: observation[INFO_KEY]}

    wrapped = SeparateMask(environment)
    wrapped.observation_space = _find_other_parts(space)
    return wrapped


def _has_mask(space: Any) -> bool:
    return INFO_KEY in getattr(space, "spaces", ())


def _find_other_parts(space: Any) -> Any:
    """A Dict without its mask: the other part itself where there is but one, as in PettingZoo's classic games."""
    import gymnasium

    parts = {name: part for name, part in space.spaces.items() if name != INFO_KEY}
    return next(iter(parts.values())) if len(parts) == 1 else gymnasium.spaces.Dict(parts)


def _select_parts(observation: Any, space: Any) -> Any:
    """Those of an observation that are left by `_find_other_parts`."""
    parts = {name: observation[name] for name in space.spaces if name != INFO_KEY}
    return next(iter(parts.values())) if len(parts) == 1 else parts


def reset_environment(environment: Any, name: str, agents: Sequence[str] = ()) -> tuple[Any, dict[str, Any]]:
    """The environment's first observation and its info; of several agents, those of the first, or of the first among
    `agents`, whose turn may come later. Raises ConfigError."""
    with translate_environment_errors(name):
        observation, *rest = environment.reset(seed=0)  # one that gives no info is refused by its observation
        info = rest[0] if len(rest) == 1 else {}
        if not is_parallel(environment):
            return observation, info
        for _ in range(MAX_TURNS):
            agent = next((agent for agent in observation if not agents or agent in agents), None)
            if agent is not None:
                return observation[agent], info.get(agent, {})
            actions = {each: _sample_action(environment, each, info.get(each, {})) for each in observation}
            observation, _, _, _, info = environment.step(actions)
    raise ConfigError("env", name, f"shows nothing to {' or '.join(agents)} in {MAX_TURNS} steps", "leave them out")


def _sample_action(environment: Any, agent: str, info: Mapping[str, Any]) -> Any:
    space = environment.action_space(agent)
    mask = info.get(INFO_KEY)
    return space.sample() if mask is None else int(np.flatnonzero(mask)[0])


def require_matching_spaces(environment: Any, name: str, spec: ExperienceSpec) -> None:
    """Raise ConfigError unless the run at the gateway has this environment's actions and observations."""
    observations, actions = get_spaces(environment, name, spec.agents)
    if not _fits(actions, spec):
        wanted = (
            f"choices of {list(spec.policy.action_sizes)}"
            if spec.policy.action_sizes
            else f"Discrete({int(spec.action.high or 0) + 1})"
            if spec.action.numpy_dtype().kind != "f"
            else f"a Box of {list(spec.action.shape)} from {list(spec.policy.action_low)}"
            f" to {list(spec.policy.action_high)}"
        )
        raise ConfigError("env", name, f"acts with {actions}, and this run with {wanted}", "take the run's own")
    if tuple(observations.shape or ()) != spec.observation.shape:
        problem = f"observes {observations}, and this run {spec.observation.dtype} {list(spec.observation.shape)}"
        raise ConfigError("env", name, problem, "take the run's own")


def _fits(actions: Any, spec: ExperienceSpec) -> bool:
    """Whether a gymnasium space has the actions of a run."""
    if spec.policy.action_sizes or type(actions).__name__ in ("MultiDiscrete", "MultiBinary"):
        return actions.shape == spec.action.shape and get_action_sizes(actions) == spec.policy.action_sizes
    if spec.action.numpy_dtype().kind != "f":
        is_counted = type(actions).__name__ == "Discrete" and actions.start == 0
        return is_counted and bool(actions.n == int(spec.action.high or 0) + 1)
    return (
        type(actions).__name__ == "Box"
        and tuple(actions.shape) == spec.action.shape
        and get_action_bounds(actions) == (spec.policy.action_low, spec.policy.action_high)
    )


def get_action_sizes(space: Any) -> tuple[int, ...]:
    """How many values each number of a MultiDiscrete or a MultiBinary has, from 0 on; () for another space."""
    if type(space).__name__ == "MultiBinary":
        return (2,) * int(math.prod(space.shape))
    if type(space).__name__ != "MultiDiscrete" or np.any(space.start):
        return ()
    return tuple(int(size) for size in space.nvec.ravel())


def get_action_bounds(space: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The lowest and the highest float32 within the bounds of each number of a Box, in C order."""
    low, high = space.low.astype(np.float32), space.high.astype(np.float32)
    low = np.where(low < space.low, np.nextafter(low, np.float32(np.inf)), low)
    high = np.where(high > space.high, np.nextafter(high, np.float32(-np.inf)), high)
    return tuple(low.ravel().tolist()), tuple(high.ravel().tolist())


@contextmanager
def translate_environment_errors(name: str) -> Iterator[None]:
    """Turn any exception of the environment into a ConfigError that names its place."""
    try:
        yield
    except ShoalError:
        raise
    except Exception as error:  # user code may raise anything
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{os.path.basename(last.filename)}:{last.lineno}"
        raise ConfigError("env", name, f"raised {type(error).__name__}: {error} ({place})") from error

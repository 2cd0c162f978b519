"""Create a run's environment, with one-line errors. For actors, and for checks of a run."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from shoal.actor.agent_streams import is_parallel, to_float
from shoal.actor.connection import format_actor_command
from shoal.actor.other_games import adapt_aec, flatten_agents, flatten_environment
from shoal.errors import ConfigError, ShoalError, format_install
from shoal.plugins.find import find_in_library
from shoal.wire import ExperienceSpec
from shoal.wire.action_masks import INFO_KEY
from shoal.wire.given_spaces import GivenSpaces

PICTURES = "rgb_array"  # the render mode of gymnasium's and PettingZoo's environments
ASK = "ask"  # an `env` whose spaces the first game brings
MAX_TURNS = 100  # until it is an agent's turn for the first time


def has_environment(name: str) -> bool:
    """Whether `env` names an environment; otherwise it gives the spaces of games that join, or asks for them."""
    return name != ASK and not name.startswith("{")


def describe_joining(address: str, websocket: str, env: str, server_key: str, ignored: Sequence[str] = ()) -> str:
    """What to do to join a run. websocket: its address for games, or an empty string"""
    if has_environment(env):
        return f"start each actor with\n    {format_actor_command(address, env, server_key, ignored)}"
    key = f" with the server key {server_key}" if server_key else ""
    return f"games join at {address}{key}{' or ' * bool(websocket)}{websocket}"


def parse_environment(env: Any) -> Any:
    """What `env` says, as text: spaces that are given as a mapping, or in a YAML file, become JSON, checked. Raises
    ValueError."""
    from shoal.yaml_text import parse_yaml  # an actor needs none

    if isinstance(env, str) and env.endswith((".yaml", ".yml", ".json")):
        path = Path(env)
        if not path.is_file():
            raise ValueError(f"there is no file {path.absolute()}: give the path of one that has the spaces")
        content = parse_yaml(path.read_text())
        env = {"name": path.stem, **content} if isinstance(content, Mapping) else content
        if not isinstance(env, Mapping):
            raise ValueError("has no mapping: write `observation: [4]` and `action: 3` there")
    if isinstance(env, str) and env.startswith("{"):
        env = parse_yaml(env)
    if not isinstance(env, Mapping):
        return env
    if "policies" not in env:
        GivenSpaces.parse(env)
    elif not isinstance(env["policies"], Mapping) or not env["policies"] or env.keys() - {"name", "policies"}:
        raise ValueError("policies takes the spaces of each policy by its name, and has no other field beside it")
    else:
        for name, each in env["policies"].items():
            GivenSpaces.parse(each, f"policies.{name}.")
    return json.dumps(env)


def make_environment(name: str, ignored: Sequence[str] = (), *, draws: bool = False) -> Any:
    """The environment of a gymnasium id; `module:Id` imports the module first. `module:function` or `file.py:function`
    calls the function, which returns an environment of one agent or of several, which act at once (`agent_streams`) or
    in turns (PettingZoo's AEC). Raises ConfigError.

    Observations of a Dict, a Tuple, or of integers that are no Box become a flat Box; those of booleans become bytes.
    A Dict's "action_mask" moves to info, and its `ignored` parts are left out. The same holds for each of several
    agents.

    draws: `render` returns pictures, where the environment can; a function is asked to by its argument `render_mode`
    """
    if not has_environment(name):
        problem = "gives spaces, and no environment that could be played here"
        raise ConfigError("env", name, problem, "let a game join the run: docs/games/README.md")
    if (folder := os.getcwd()) not in sys.path:  # a program such as `shoal` has its own folder there
        sys.path.append(folder)
    if (function := _find_function(name)) is not None:
        if draws and "render_mode" in inspect.signature(function).parameters:
            function = partial(function, render_mode=PICTURES)
        return _call_function(function, name, ignored)
    try:
        import gymnasium
    except ImportError:
        raise ConfigError("env", name, "needs gymnasium", format_install("gym")) from None
    module = name.partition(":")[0]
    with translate_environment_errors(name):
        try:
            environment = gymnasium.make(name)
            if draws and PICTURES in environment.metadata.get("render_modes", ()):
                environment.close()
                environment = gymnasium.make(name, render_mode=PICTURES)
            return flatten_environment(environment, name, ignored)
        except gymnasium.error.DependencyNotInstalled as error:
            remedy = format_install("box2d") if "box2d" in str(error) else "install what it names"
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
def open_environment(name: str, ignored: Sequence[str] = (), *, draws: bool = False) -> Iterator[Any]:
    """`make_environment`, closed at the end if it can be closed."""
    environment = make_environment(name, ignored, draws=draws)
    try:
        yield environment
    finally:
        getattr(environment, "close", lambda: None)()


def load_film_maker() -> Callable[..., Any]:
    """What films an actor's environment: `film(environment, clients, folder, every)` returns one to play in its place.
    Raises ConfigError without a library that does, MissingExtra without what it needs."""
    maker: Callable[..., Any] = find_in_library("actor", "shoal.films", "films", "record")
    return maker


def _call_function(function: Callable[[], Any], name: str, ignored: Sequence[str]) -> Any:
    with translate_environment_errors(name):
        instance = function()
    if not all(callable(getattr(instance, method, None)) for method in ("reset", "step")):
        problem = f"returned a {type(instance).__name__}, which has no reset and step"
        raise ConfigError("env", name, problem, "return an environment")
    with translate_environment_errors(name):
        if is_parallel(instance):
            return flatten_agents(adapt_aec(instance), name, ignored)
        gymnasium = sys.modules.get("gymnasium")
        if gymnasium is not None and isinstance(instance, gymnasium.Env):
            return flatten_environment(instance, name, ignored)
    if ignored:
        raise ConfigError("ignore", ignored[0], f"is no part of what {name} observes", "leave it out there")
    return instance


def _find_function(name: str) -> Callable[..., Any] | None:
    """The function that `module:function` names, if there is one: otherwise it is an id for gymnasium."""
    module, _, attribute = name.partition(":")
    if not attribute.isidentifier():
        return None
    if is_file := module.endswith(".py"):
        if not os.path.isfile(module):
            raise ConfigError("env", name, f"there is no file {os.path.abspath(module)}", "give its path")
        folder, file = os.path.split(os.path.abspath(module))
        module = file.removesuffix(".py")
        if folder not in sys.path:
            sys.path.insert(0, folder)
    with translate_environment_errors(name):
        try:
            member = getattr(importlib.import_module(module), attribute, None)
        except ModuleNotFoundError as error:
            if error.name not in (module, module.partition(".")[0]):
                raise  # what the module itself imports
            return None
    if is_file and not callable(member):
        raise ConfigError("env", name, f"the file has no function {attribute}", "name one that it has")
    return member if callable(member) else None


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
            remedy = "pad them to the same, since they have one policy; or give them several: shoal run policies"
            raise ConfigError("env", name, problem, remedy)
    return spaces[0]


def reset_environment(environment: Any, name: str, agents: Sequence[str] = ()) -> tuple[Any, dict[str, Any]]:
    """The environment's first observation and its info; of several agents, those of the first, or of the first among
    `agents`, whose turn may come later. Raises ConfigError."""
    with translate_environment_errors(name):
        observation, *rest = environment.reset(seed=0)  # one that gives no info is refused by its observation
        info = dict(rest[0]) if len(rest) == 1 and isinstance(rest[0], Mapping) else {}
        if not is_parallel(environment):
            return observation, info
        for _ in range(MAX_TURNS):
            agent = next((agent for agent in observation if not agents or agent in agents), None)
            if agent is not None:
                return observation[agent], info.get(agent, {})
            observation, _, _, _, info = environment.step(_pick_actions(environment, observation, info))
    raise ConfigError("env", name, f"shows nothing to {' or '.join(agents)} in {MAX_TURNS} steps", "leave them out")


def check_step(environment: Any, name: str, info: Mapping[str, Any]) -> None:
    """Take one step after `reset_environment`, which has given this info. Raises ConfigError for a step that is not
    gymnasium's or PettingZoo's, or for a reward that is no number."""
    with translate_environment_errors(name):
        try:
            if is_parallel(environment):
                observations, infos = environment.reset(seed=0)
                taken = environment.step(_pick_actions(environment, observations, infos))
            else:
                taken = environment.step(pick_action(environment.action_space, info.get(INFO_KEY)))
            _, rewards, _, _, _ = taken
        except ValueError as error:  # of gymnasium's wrappers, too
            if "values to unpack (expected 5" not in str(error):
                raise
            remedy = "return observation, reward, terminated, truncated, info, as gymnasium does; gym's `done` is"
            remedy += " terminated, or truncated by a time limit"
            raise ConfigError("env", name, f"step returns no 5 values ({error})", remedy) from None
        for reward in rewards.values() if is_parallel(environment) else [rewards]:
            to_float(reward)


def _pick_actions(
    environment: Any, observations: Mapping[str, Any], infos: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    return {
        agent: pick_action(environment.action_space(agent), infos.get(agent, {}).get(INFO_KEY))
        for agent in observations
    }


def pick_action(space: Any, mask: Any = None) -> Any:
    """The first action of a space that the mask allows; of a Box the middle."""
    kind = type(space).__name__
    if kind == "Box":
        return ((space.low.astype(np.float64) + space.high) / 2).astype(space.dtype)
    if kind == "Discrete":
        return int(space.start if mask is None else np.flatnonzero(mask)[0])
    bounds = np.cumsum([0, *get_action_sizes(space)])
    allowed = np.ones(bounds[-1], np.bool_) if mask is None else np.asarray(mask, np.bool_)
    picked = [int(np.flatnonzero(allowed[begin:end])[0]) for begin, end in pairwise(bounds)]
    return np.array(picked, space.dtype).reshape(space.shape)


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


def apply_settings(environments: Sequence[Any], settings: Mapping[str, Any]) -> None:
    """Give what the run tells its games to those environments that have a method `apply_settings`."""
    for each in environments:
        getattr(getattr(each, "unwrapped", each), "apply_settings", lambda _: None)(settings)


@contextmanager
def translate_environment_errors(name: str) -> Iterator[None]:
    """Turn any exception of the environment into a ConfigError that names its place."""
    try:
        yield
    except ShoalError:
        raise
    except Exception as error:  # user code may raise anything
        last = traceback.extract_tb(error.__traceback__)[-1]
        location = f"{os.path.basename(last.filename)}:{last.lineno}"
        raise ConfigError("env", name, f"raised {type(error).__name__}: {error} ({location})") from error

"""Games that an actor's loop does not take as they are: observations become flat, and agents that act one after the
other an environment of several agents.

Flat are parts of a Dict or a Tuple end to end, and choices as one-hot vectors. An "action_mask" among the parts of a
Dict moves to info, and ignored parts are left out. Called when an environment is made, and by the ready loops. Imports
gymnasium only for spaces that need it; PettingZoo is not needed: its methods are enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal.errors import ConfigError
from shoal.wire import SpaceSpec
from shoal.wire.action_masks import INFO_KEY
from shoal.wire.spaces import describe_space

# Observations that become one array, as gymnasium.spaces.flatten does: parts in the order of the space, choices as
# one-hot vectors.
FLATTENED = ("Dict", "Tuple", "Discrete", "MultiDiscrete", "MultiBinary")


class FlatSpace:
    """What becomes of the observations of `space`. Raises ConfigError for parts that do not become numbers.

    ignored: names of a Dict's parts
    """

    def __init__(self, space: Any, name: str, ignored: Sequence[str] = ()) -> None:
        parts = _get_parts(space)
        self.has_mask = INFO_KEY in parts
        self._names = [each for each in parts if each != INFO_KEY and each not in ignored]
        self.described = describe_space(space, ignored)
        self._parts = space
        if len(self._names) < len(parts):
            if not self._names:
                raise ConfigError("env", name, f"has nothing to observe but {', '.join(parts)}", "leave a part in")
            import gymnasium

            chosen = {each: parts[each] for each in self._names}  # one part is itself, as in PettingZoo's classic games
            self._parts = chosen[self._names[0]] if len(chosen) == 1 else gymnasium.spaces.Dict(chosen)
        self._is_flattened = type(self._parts).__name__ in FLATTENED
        self._is_selected = self._parts is not space
        self.space = self._flatten_space(name)
        self.is_changed = self.space is not space

    def _flatten_space(self, name: str) -> Any:
        if self._is_flattened:
            import gymnasium

            try:
                return gymnasium.spaces.flatten_space(self._parts)
            except NotImplementedError:
                raise _describe_unknown_parts(self._parts, name) from None
        if self._parts.dtype == np.bool_:
            import gymnasium

            return gymnasium.spaces.Box(0, 1, self._parts.shape, np.uint8)
        return self._parts

    def flatten(self, observation: Any, info: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """The flat observation, and its info with the mask."""
        if self.has_mask:
            info = {**info, INFO_KEY: observation[INFO_KEY]}
        if self._is_selected:
            chosen = {each: observation[each] for each in self._names}
            observation = next(iter(chosen.values())) if len(chosen) == 1 else chosen
        if self._is_flattened:
            import gymnasium

            return gymnasium.spaces.flatten(self._parts, observation), info
        return np.asarray(observation).astype(np.uint8) if self._parts.dtype == np.bool_ else observation, info


def _get_parts(space: Any) -> Mapping[str, Any]:
    """The named parts of a Dict; none of another space."""
    parts: Mapping[str, Any] = space.spaces if type(space).__name__ == "Dict" else {}
    return parts


def _describe_unknown_parts(space: Any, name: str) -> ConfigError:
    """The error about the parts that gymnasium cannot flatten."""
    import gymnasium

    unknown = dict[str, str]()
    for each, part in _get_parts(space).items():
        try:
            gymnasium.spaces.flatten_space(part)
        except NotImplementedError:
            unknown[each] = type(part).__name__
    if not unknown:
        return ConfigError("env", name, f"observes {space}, which does not become numbers", "wrap it")
    problem = f"observes {', '.join(f'{each} ({kind})' for each, kind in unknown.items())}, which becomes no numbers"
    options = " ".join(f"--ignore {each}" for each in unknown)
    remedy = f"leave it out: ignore=[{','.join(unknown)}] of the run, and {options} of each actor"
    return ConfigError("env", name, problem, remedy)


def _require_parts(ignored: Sequence[str], parts: Sequence[str], name: str) -> None:
    """Raise ConfigError for an ignored part that is not there."""
    if unknown := [each for each in ignored if each not in parts]:
        remedy = f"its parts are {', '.join(parts)}" if parts else "leave it out"
        raise ConfigError("ignore", unknown[0], f"is no part of a Dict that {name} observes", remedy)


def flatten_environment(environment: Any, name: str, ignored: Sequence[str] = ()) -> Any:
    """A gymnasium environment whose observations are a Box, and whose action mask is in info. Raises ConfigError."""
    import gymnasium

    _require_parts(ignored, list(_get_parts(environment.observation_space)), name)
    flat = FlatSpace(environment.observation_space, name, ignored)
    if not flat.is_changed:
        return environment

    class Flat(gymnasium.Wrapper):  # type: ignore[misc]
        def reset(self, **options: Any) -> tuple[Any, Mapping[str, Any]]:
            return flat.flatten(*self.env.reset(**options))

        def step(self, action: Any) -> tuple[Any, ...]:
            observation, *outcome, info = self.env.step(action)
            observation, info = flat.flatten(observation, info)
            return observation, *outcome, info  # of gym's old API there are four: the check of a run names them

    wrapped = Flat(environment)
    wrapped.observation_space = flat.space
    wrapped.flat = flat
    return wrapped


def find_flattened(environment: Any, agents: Sequence[str] = ()) -> SpaceSpec | None:
    """What the environment shows before it becomes flat; None where it is flat by itself. agents: those that are asked
    for, in an environment of several; (): all, who see alike."""
    if isinstance(environment, FlatAgents):
        return environment.flat[agents[0] if agents else environment.possible_agents[0]].described
    flat = getattr(environment, "flat", None)
    return flat.described if isinstance(flat, FlatSpace) else None


def flatten_agents(environment: Any, name: str, ignored: Sequence[str] = ()) -> Any:
    """Do so for an environment of several agents, by PettingZoo's methods; an ignored part need not be each one's."""
    spaces = {agent: environment.observation_space(agent) for agent in environment.possible_agents}
    _require_parts(ignored, [part for space in spaces.values() for part in _get_parts(space)], name)
    flat = {agent: FlatSpace(space, name, ignored) for agent, space in spaces.items()}
    return FlatAgents(environment, flat) if any(each.is_changed for each in flat.values()) else environment


class FlatAgents:
    """An environment of several agents, with flat observations and masks in infos."""

    def __init__(self, environment: Any, flat: Mapping[str, FlatSpace]) -> None:
        self._environment, self.flat = environment, flat

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    def observation_space(self, agent: str) -> Any:
        return self.flat[agent].space

    def reset(self, seed: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        return self._flatten(*self._environment.reset(seed=seed))

    def step(self, actions: Mapping[str, Any]) -> tuple[Any, ...]:
        observations, *outcome, infos = self._environment.step(actions)
        observations, infos = self._flatten(observations, infos)
        return observations, *outcome, infos

    def _flatten(
        self, observations: Mapping[str, Any], infos: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        flat, result = dict[str, Any](), dict(infos)
        for agent, observation in observations.items():
            flat[agent], result[agent] = self.flat[agent].flatten(observation, result.get(agent, {}))
        return flat, result


def adapt_aec(environment: Any) -> Any:
    """The environment; one with PettingZoo's AEC methods, which no parallel one has, as one of several agents."""
    methods = ("last", "observe", "observation_space")
    return AECGame(environment) if all(callable(getattr(environment, each, None)) for each in methods) else environment


class AECGame:
    """The agent whose turn it is has an observation, and the others wait. With it comes what its last action was worth:
    the rewards since its last turn. An agent that has ended gets its last observation then, too."""

    last = observe = None  # so that it is no such game itself

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    def reset(self, seed: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self._environment.reset(seed=seed)
        observations, _, _, _, infos = self._advance()
        return observations, infos

    def step(self, actions: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
        self._environment.step(actions[self._environment.agent_selection])
        return self._advance()

    def _advance(self) -> tuple[dict[str, Any], ...]:
        """To the next agent that acts, past those that have ended, whose only action is None."""
        result: tuple[dict[str, Any], ...] = {}, {}, {}, {}, {}
        while self._environment.agents:
            agent, last = self._environment.agent_selection, self._environment.last()
            for values, value in zip(result, last, strict=True):
                values[agent] = value
            if not (last[2] or last[3]):
                break
            self._environment.step(None)
        return result

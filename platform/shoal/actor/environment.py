"""Create a run's gymnasium environment, with one-line errors. For actors, and for checks of a run."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shoal.errors import ConfigError, ShoalError
from shoal.wire import ExperienceSpec


def make_environment(name: str) -> Any:
    """The environment of a gymnasium id; `module:Id` imports the module first. Raises ConfigError."""
    try:
        import gymnasium
    except ImportError:
        raise ConfigError(
            "env", name, "needs gymnasium", "pip install 'CHECKOUT[gym]', with the folder of Shoal's sources"
        ) from None
    module = name.partition(":")[0]
    with translate_environment_errors(name):
        try:
            return gymnasium.make(name)
        except gymnasium.error.Error as error:
            remedy = "name one that gymnasium knows, or module:Id to import module first"
            raise ConfigError("env", name, f"cannot be made: {error}", remedy) from None
        except ModuleNotFoundError as error:
            missing = getattr(error.__cause__ or error, "name", None)  # gymnasium wraps it
            if missing not in (None, module.partition(".")[0], module):
                raise  # what the module itself imports
            problem = f"there is no module {module!r} in {os.getcwd()}, and none is installed"
            remedy = "run it in the folder that holds the module, or name that in PYTHONPATH"
            raise ConfigError("env", name, problem, remedy) from None


def get_first_observation(environment: Any, name: str) -> Any:
    """The environment's first observation. Raises ConfigError."""
    with translate_environment_errors(name):
        return environment.reset(seed=0)[0]


def require_matching_spaces(environment: Any, name: str, spec: ExperienceSpec) -> None:
    """Raise ConfigError unless the run at the gateway has this environment's actions and observations."""
    actions, observations = environment.action_space, environment.observation_space
    count, wanted = getattr(actions, "n", None), int(spec.action.high or 0) + 1
    if type(actions).__name__ != "Discrete" or count != wanted or actions.start != 0:
        raise ConfigError(
            "env", name, f"acts with {actions}, and this run with Discrete({wanted})", "take the run's own"
        )
    if tuple(observations.shape or ()) != spec.observation.shape:
        problem = f"observes {observations}, and this run {spec.observation.dtype} {list(spec.observation.shape)}"
        raise ConfigError("env", name, problem, "take the run's own")


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

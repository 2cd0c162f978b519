"""Where tasks come from, and rewards: environments.

    env=reasoning_gym:chain_sum     a dataset of reasoning-gym, with its scores
    env=my_env.py:grade             a function (task, answer) -> reward, and `tasks` of the same file
    env=my_package.envs:MyEnv       an object with make_task(seed) and grade(task, answer), or its class

`tasks` is a list, or a function of a seed; a task is a text, an AgentTask, or a mapping with an AgentTask's fields.

Called by the driver, in threads: several answers may be graded at once. Never speaks to a gateway.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import msgspec

from shoal.errors import ConfigError, ShoalError, needs_extra, suggest, summarize_error
from shoal.plugins.find import load_reference

MAX_TASK_BYTES = 64 * 1024  # of the wire format
NUM_REMEMBERED = 1024  # tasks between their making and their last grading


class EpisodeFailed(ShoalError):
    """An episode ends without a reward, for this reason."""


class AgentTask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the episodes of a group are about.

    prompt: a text, or the messages of a chat
    data:   for the grader. The agent has it too, and the gateway stores and shows it: no place for secrets
    """

    prompt: str | list[dict[str, Any]]
    data: dict[str, Any] = {}

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt

    def encode(self) -> bytes:
        """As JSON: `messages` and `data`. Raises ConfigError for what is not JSON, or has more than 64 KB."""
        try:
            encoded = msgspec.json.encode({"messages": self.messages, "data": self.data})
        except TypeError as error:
            raise ConfigError("task", self, f"is not JSON: {error}", "convert it, or leave it out of `data`") from None
        if len(encoded) > MAX_TASK_BYTES:
            problem = f"has {len(encoded):,} bytes, and may have {MAX_TASK_BYTES:,}"
            raise ConfigError("task", self, problem, "let `data` name a file in place of its content")
        return encoded


class AgentEnvironment(Protocol):
    """What makes tasks, and grades answers. Both may raise anything."""

    def make_task(self, seed: int) -> AgentTask:
        """The task of this seed, from 0 on: the same one each time."""
        ...

    def grade(self, task: AgentTask, answer: str) -> float:
        """The reward of an answer."""
        ...


class ReasoningGym:
    """A dataset of reasoning-gym (arXiv 2505.24760), whose own scores, from 0 to 1, are the rewards.

    An answer is what stands last between <answer> and </answer>, or all of the text.

    name:   of the dataset
    fields: of its configuration, as max_terms=3

    Raises ConfigError for a name or a field that it does not know, MissingExtra without reasoning-gym.
    """

    def __init__(self, name: str, **fields: Any) -> None:
        with needs_extra("agents"):
            from reasoning_gym.factory import DATASETS, create_dataset
        if name not in DATASETS:
            raise ConfigError("env", name, "is no dataset of reasoning-gym", suggest(name, DATASETS))

        @lru_cache(NUM_REMEMBERED)
        def generate(seed: int) -> tuple[Any, dict[str, Any]]:
            dataset = create_dataset(name, seed=seed, size=1, **fields)
            return dataset, dataset[0]

        self._name, self._generate = name, generate
        try:
            generate(0)
        except (AssertionError, TypeError) as error:  # of its own checks
            raise ConfigError("env", fields, f"is no configuration of {name}: {error}") from None

    def make_task(self, seed: int) -> AgentTask:
        _, entry = self._generate(seed)
        return AgentTask(entry["question"], {"dataset": self._name, "seed": seed})

    def grade(self, task: AgentTask, answer: str) -> float:
        dataset, entry = self._generate(task.data["seed"])
        marked = re.findall("<answer>(.*?)</answer>", answer, re.DOTALL)
        return float(dataset.score_answer((marked or [answer])[-1].strip(), entry))


class GradedTasks:
    """Tasks of a list, in its order and then again, or of a function of the seed; graded by another function."""

    def __init__(self, grade: Callable[[AgentTask, str], float], tasks: Sequence[Any] | Callable[[int], Any]) -> None:
        self._grade, self._tasks = grade, tasks

    def make_task(self, seed: int) -> AgentTask:
        made = self._tasks(seed) if callable(self._tasks) else self._tasks[seed % len(self._tasks)]
        try:
            return msgspec.convert({"prompt": made} if isinstance(made, str) else made, AgentTask)
        except msgspec.ValidationError as error:
            remedy = "give a text, or a mapping with `prompt`, and `data` for all else"
            raise ConfigError("task", made, f"is no task: {error}", remedy) from None

    def grade(self, task: AgentTask, answer: str) -> float:
        return self._grade(task, answer)


def load_environment(name: str) -> AgentEnvironment:
    """The environment that `env` names. Raises ConfigError, MissingExtra."""
    module, _, attribute = name.partition(":")
    if module == "reasoning_gym":
        return ReasoningGym(attribute)
    try:
        found = load_reference(name)
        is_complete = hasattr(found, "make_task")
        tasks: Any = None if is_complete else load_reference(f"{module}:tasks")
        if not (is_complete or callable(tasks) or tasks):
            raise ValueError("its `tasks` are empty")
    except ValueError as error:
        remedy = "name a function (task, answer) -> reward of a file that has `tasks` too, or reasoning_gym:DATASET"
        raise ConfigError("env", name, str(error), remedy) from None
    if is_complete:
        environment: AgentEnvironment = found() if isinstance(found, type) else found
        return environment
    return GradedTasks(found, tasks)


def grade_answer(environment: AgentEnvironment, task: AgentTask, answer: str) -> float:
    """The reward of an answer. Raises EpisodeFailed where the grader raises, or gives no finite number."""
    try:
        reward = float(environment.grade(task, answer))
    except Exception as error:
        reason = f"the grader raised {type(error).__name__}: {summarize_error(error)}"
        raise EpisodeFailed(reason) from error
    if not math.isfinite(reward):
        raise EpisodeFailed(f"the grader gave {reward}")
    return reward

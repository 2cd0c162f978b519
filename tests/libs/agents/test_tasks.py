"""Environments of agents: where tasks come from, and what a grader may do."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from blocks import read_files
from shoal.errors import ConfigError, MissingExtra
from shoal.libs.agents.tasks import AgentTask, EpisodeFailed, GradedTasks, grade_answer, load_environment

GRADED = """
tasks = ["2 + 2?", {"prompt": "3 + 3?", "data": {"sum": 6}}]

def grade(task, answer):
    return answer == str(task.data.get("sum", 4))
"""
SEEDED = """
from shoal.libs.agents.tasks import AgentTask

def tasks(seed):
    return AgentTask([{"role": "system", "content": "be brief"}, {"role": "user", "content": str(seed)}])

def grade(task, answer):
    return 0.5
"""
COMPLETE = """
class Env:
    def make_task(self, seed):
        return seed

    def grade(self, task, answer):
        return 1
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Writes a module of this name, and returns the path of its file."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(name: str, text: str) -> str:
        monkeypatch.delitem(sys.modules, name, raising=False)
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        return str(path)

    return write


def test_a_list_gives_its_tasks_in_order_and_then_again(write: Callable[[str, str], str]) -> None:
    environment = load_environment(f"{write('graded_env', GRADED)}:grade")
    first, second = environment.make_task(0), environment.make_task(1)
    assert environment.make_task(2) == first
    assert msgspec.json.decode(second.encode()) == {
        "messages": [{"role": "user", "content": "3 + 3?"}],
        "data": {"sum": 6},
    }
    assert [grade_answer(environment, first, answer) for answer in "46"] == [1.0, 0.0]
    assert grade_answer(environment, second, "6") == 1.0


def test_a_function_makes_the_task_of_a_seed(write: Callable[[str, str], str]) -> None:
    environment = load_environment(f"{write('seeded_env', SEEDED)}:grade")
    assert environment.make_task(7).messages[1] == {"role": "user", "content": "7"}


def test_a_class_is_an_environment(write: Callable[[str, str], str]) -> None:
    environment = load_environment(f"{write('complete_env', COMPLETE)}:Env")
    assert environment.make_task(3) == 3


def test_what_is_no_environment_is_named(write: Callable[[str, str], str]) -> None:
    path = write("bare_env", "def grade(task, answer): return 1")
    for env in (f"{path}:grade", f"{path}:grades", "no_such_module_at_all:grade", "grade"):
        with pytest.raises(ConfigError, match="env = "):
            load_environment(env)


@pytest.mark.parametrize("made", [5, {"question": "2 + 2?"}, {"prompt": "2 + 2?", "answer": 4}])
def test_what_is_no_task_is_named(made: Any) -> None:
    with pytest.raises(ConfigError, match="is no task"):
        GradedTasks(lambda task, answer: 1.0, [made]).make_task(0)


@pytest.mark.parametrize("data", [{"x": object()}, {"x": "y" * 70_000}])
def test_a_task_is_json_of_a_limited_size(data: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="task"):
        AgentTask("2 + 2?", data).encode()


def _fail(task: AgentTask, answer: str) -> float:
    raise LookupError("no sandbox")


@pytest.mark.parametrize(
    ("grade", "reason"),
    [
        (_fail, "LookupError: no sandbox"),
        (lambda task, answer: float("nan"), "nan"),
        (lambda task, answer: -float("inf"), "-inf"),
        (lambda task, answer: None, "TypeError"),
    ],
)
def test_a_grader_without_a_number_fails_the_episode(grade: Callable[..., Any], reason: str) -> None:
    environment = GradedTasks(grade, ["2 + 2?"])
    with pytest.raises(EpisodeFailed, match=reason):
        grade_answer(environment, environment.make_task(0), "4")


class FakeSums:
    """A dataset of reasoning-gym, as far as it is called."""

    def __init__(self, seed: int, size: int, max_terms: int = 2) -> None:
        assert max_terms > 1, "max_terms must be at least 2"
        self._seed = seed

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"question": f"{self._seed} + 1 =", "answer": str(self._seed + 1), "metadata": {}}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        return float(answer == entry["answer"])


@pytest.fixture
def reasoning_gym(monkeypatch: pytest.MonkeyPatch) -> None:
    """Datasets without the package."""
    factory = SimpleNamespace(DATASETS={"sums": None}, create_dataset=lambda name, **fields: FakeSums(**fields))
    monkeypatch.setitem(sys.modules, "reasoning_gym", ModuleType("reasoning_gym"))
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)


@pytest.mark.usefixtures("reasoning_gym")
def test_a_dataset_of_reasoning_gym_scores_what_is_marked_or_all_of_the_text(
    write: Callable[[str, str], str],
) -> None:
    environment = load_environment("reasoning_gym:sums")
    task = environment.make_task(41)
    assert (task.prompt, task.data) == ("41 + 1 =", {"dataset": "sums", "seed": 41})
    assert [grade_answer(environment, task, answer) for answer in ("42", " 42\n", "It is 42.")] == [1.0, 1.0, 0.0]
    assert grade_answer(environment, task, "<answer>1</answer> no: <answer> 42 </answer>.") == 1.0
    with pytest.raises(ConfigError, match="did you mean 'sums'"):
        load_environment("reasoning_gym:sum")
    own = "from shoal.libs.agents.tasks import ReasoningGym\neasy = ReasoningGym('sums', max_terms={})"
    assert load_environment(f"{write('easy_sums', own.format(3))}:easy").make_task(1) == AgentTask(
        "1 + 1 =", {"dataset": "sums", "seed": 1}
    )
    with pytest.raises(ConfigError, match="max_terms must be at least 2"):
        load_environment(f"{write('no_sums', own.format(1))}:easy")


def test_without_reasoning_gym_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(MissingExtra, match=r"\[agents\]"):
        load_environment("reasoning_gym:chain_sum")


def test_the_tutorial_measures_by_tasks_that_were_not_learnt(write: Callable[[str, str], str]) -> None:
    path = write("sorter", read_files("tutorials/agents.md")["sorter.py"])
    learnt, held_out = load_environment(f"{path}:grade"), load_environment(f"{path}:held_out")
    asked = [{each.make_task(seed).encode() for seed in range(200)} for each in (held_out, learnt)]
    assert min(map(len, asked)) > 190
    assert len(asked[0] & asked[1]) < 3  # of 100,000 that there are
    task = held_out.make_task(0)
    right = task.data["answer"]
    assert [held_out.grade(task, answer) for answer in (right, right[:4], f"{right}{right}", "")] == [1, 0.8, 0.5, 0]

"""A trial of a sweep that is a run of the loop: it learns, reports, ends its actors, and goes on after an end."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
from test_trials import read_all

import shoal.runs
from leftovers import children_of, still_alive
from shoal.errors import ConfigError
from shoal.libs.sweep.command import make_overrides
from shoal.libs.sweep.flow import plan_trials
from shoal.libs.sweep.loop_spec import LoopTrialSpec, load_loop_recipe
from shoal.libs.sweep.loop_trial import LoopTrial, register_trial
from shoal.libs.sweep.spec import SweepSpec, check_sweep, sweep_from_overrides
from shoal.registry import Registry
from shoal.runs import RunKind, Status
from shoal.search.space import SearchSpace

JOB = f"{Path(__file__).parents[2] / 'sign_job.py'}"
RATE, STOP = "algorithm.learning_rate=log(1e-4,1e-1)", "stop.steps=4000"


def spec_of(*words: str, actors: int | None = None, **fields: Any) -> SweepSpec:
    """As `shoal sweep` makes it from its words."""
    overrides = [*make_overrides(JOB, words, actors), *(f"{name}={value}" for name, value in fields.items())]
    return sweep_from_overrides(overrides)


@pytest.fixture
def loop() -> LoopTrialSpec:
    return load_loop_recipe(JOB).override([STOP, "reports=4", "actors=2"])


def test_a_job_of_the_loop_is_a_sweep_of_it() -> None:
    spec = spec_of(RATE, STOP, "hidden=[8]", actors=3, trials=4)
    assert (spec.loop.env, spec.loop.actors, spec.loop.hidden) == ("sign_game:SignGame", 3, (8,))
    assert spec.make_loop_spec({"algorithm.learning_rate": 0.5}).algorithm.learning_rate == 0.5  # type: ignore[attr-defined]
    assert spec == SweepSpec.from_yaml(spec.to_yaml())
    checked = check_sweep(spec)
    assert (checked.metric, checked.is_higher, checked.total_steps) == ("mean_return", True, 4000)
    assert [each.number for each in plan_trials(spec, ())] == [0, 1, 2, 3]


DEFAULTS = """
from shoal.flows.actor_learner_spec import ActorLearnerSpec
def spec():
    return ActorLearnerSpec()
"""


@pytest.mark.parametrize("name", ["impala", "ppo", "dqn", "r2d2", "sac"])
def test_without_a_distribution_an_algorithms_own_space_is_searched_from_its_defaults_on(
    name: str, tmp_path: Path
) -> None:
    (job := tmp_path / f"{name}_job.py").write_text(DEFAULTS)
    spec = sweep_from_overrides(make_overrides(str(job), (f"algorithm={name}", STOP)))
    config = spec.loop.algorithm
    words = {f"algorithm.{field}": word for field, word in config.search_space.items()}
    assert len(words) > 3
    assert spec.search_space == SearchSpace.parse(words), "each has the default in it"
    assert spec.first == {path: getattr(config, path.removeprefix("algorithm.")) for path in words}
    first, second, *_ = plan_trials(spec, ())
    assert first.parameters == spec.first
    assert second.parameters.keys() == spec.first.keys()
    assert spec.make_loop_spec(first.parameters) == spec.loop
    assert spec == SweepSpec.from_yaml(spec.to_yaml())
    if name in ("impala", "ppo"):  # which fit the game
        check_sweep(spec)


def test_fields_that_are_set_are_not_searched_and_a_distribution_replaces_an_algorithms_own_space() -> None:
    spec = spec_of("algorithm.discount=0.999", "hidden=[8]", STOP)
    assert "algorithm.discount" not in spec.space
    assert "algorithm.lambda_" in spec.space
    assert [*spec_of("algorithm.clip=uniform(0.1,0.3)", STOP).space] == ["algorithm.clip"]
    given = spec_of("algorithm.clip=uniform(0.1,0.3)", STOP, first="{algorithm.clip: 0.2}")
    assert plan_trials(given, ())[0].parameters == {"algorithm.clip": 0.2}


OWN = """
from typing import ClassVar, Literal
from shoal.extend import AlgorithmConfig
from shoal.flows.actor_learner_spec import ActorLearnerSpec
class OwnConfig(AlgorithmConfig):
    name: Literal["OWN"] = "OWN"
    pace: float = 0.5
    depth: int = 7
    search_space: ClassVar = {"pace": "log(0.01,0.1)", "depth": "choice(1,2)"}
def spec():
    return ActorLearnerSpec(env="sign_game:SignGame", algorithm={"name": "OWN"})
"""


def test_a_users_algorithm_has_a_space_of_its_own_which_is_widened_to_its_default(tmp_path: Path) -> None:
    (job := tmp_path / "own_job.py").write_text(OWN.replace("OWN", f"{tmp_path}/own_job.py:OwnConfig"))
    spec = sweep_from_overrides(make_overrides(str(job), (STOP,)))
    assert spec.space == {"algorithm.pace": "log(0.01,0.5)", "algorithm.depth": "choice(1,2,7)"}
    assert spec.first == {"algorithm.pace": 0.5, "algorithm.depth": 7}


@pytest.mark.parametrize(
    ("words", "fields", "problem"),
    [
        ((RATE,), {}, "nothing says when to end a trial"),
        ((RATE, STOP), {"first": "{algorithm.learning_rate: 0.5}"}, "no value of each field"),
        ((RATE, STOP), {"first": "{algorithm.learning_rate: -1}"}, "greater than 0"),
        ((RATE, STOP), {"search": "pbt"}, "rl_population"),
        ((RATE, STOP), {"metric": "accuracy"}, "there is mean_return"),
        ((RATE, STOP), {"direction": "min"}, "more return is better"),
        ((RATE, STOP, "reports=1"), {"scheduler": "asha"}, "too late"),
        ((RATE, STOP, "target_return=9"), {}, "no such field"),
        ((RATE, STOP, "learn_from_endpoint=true"), {}, "no endpoint"),
        ((RATE, STOP, "gateway.port=5555"), {}, "a free port"),
        ((RATE, STOP, "learner.replicas=2"), {}, "one process"),
        ((RATE, STOP, "gateway.durable=store"), {}, "one process"),
        (("env=choice(a:b,c:d)", STOP), {}, "the same in all trials"),
        ((RATE, STOP, "env=sign_game:Nothing"), {}, "sign_game:Nothing"),
    ],
)
def test_what_cannot_work_is_refused(words: tuple[str, ...], fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_sweep(spec_of(*words, **fields))
    assert problem in str(caught.value)


def test_a_task_takes_no_actors_and_another_file_is_no_job_of_the_loop(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a Task"):
        make_overrides("lenet", (RATE,), 2)
    other = tmp_path / "other.py"
    other.write_text("# ActorLearnerSpec\ndef spec():\n    return 3\n")
    with pytest.raises(ConfigError, match="gave a int"):
        load_loop_recipe(str(other))


def test_a_trial_learns_reports_and_leaves_a_policy(loop: LoopTrialSpec) -> None:
    trial = LoopTrial("t", loop)
    reports = read_all(trial)
    assert [each.is_over for each in reports] == [False] * (len(reports) - 1) + [True]
    assert 2 <= len(reports) <= 4
    assert all(a.step < b.step for a, b in itertools.pairwise(reports))
    assert (reports[-1].step >= 4000, reports[-1].progress) == (True, 1.0)
    assert reports[-1].metrics["mean_return"] > 5.0  # 4 by chance
    trial.stop()
    assert children_of(os.getpid(), "shoal.actor") == []
    record = shoal.runs.load("t")
    assert (record.kind, record.status) == (RunKind.LOOP, Status.FINISHED)
    assert record.latest()["return/mean_100"] > 4.0
    assert read_all(LoopTrial("t", loop)) == [reports[-1]]  # a finished one does not run again
    with shoal.runs.create("sweep", "", "s") as recorder:
        register_trial(loop, "t", recorder, {"sweep": "s", "trial": 0})
    manifest = Registry().get("signgame@1").manifest
    assert manifest.lineage == {"sweep": "s", "trial": 0}
    assert manifest.metrics["mean_return_100"] == reports[-1].metrics["mean_return"]


def test_a_stopped_trial_ends_its_actors_and_goes_on_from_its_checkpoint(loop: LoopTrialSpec) -> None:
    loop = loop.override(["stop.steps=16000", "reports=16"])  # far from its end when it is stopped
    trial = LoopTrial("t", loop)
    first = trial.next_report()
    pids = children_of(os.getpid(), "shoal.actor")
    assert len(pids) == 2
    trial.stop()
    assert still_alive(pids) == []
    assert shoal.runs.load("t").status is Status.STOPPED
    reports = read_all(LoopTrial("t", loop))
    assert all(each.step > first.step for each in reports)
    record = shoal.runs.load("t")
    assert (record.status, record.incarnation) == (Status.FINISHED, 2)
    assert children_of(os.getpid(), "shoal.actor") == []


def test_an_actor_that_fails_is_the_trials_failure(loop: LoopTrialSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.flows.local_run.find_python_path", str)
    last = read_all(LoopTrial("t", loop))[-1]
    assert "a trial needs all of its actors: actor-" in last.failure
    assert shoal.runs.load("t").status is Status.FAILED
    assert children_of(os.getpid(), "shoal.actor") == []

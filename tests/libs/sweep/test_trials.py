"""The trials of a sweep in its record, as runs of a Task and of the loop, and as a table."""

import itertools
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shoal.runs
from leftovers import children_of, still_alive
from shoal.cli.display import run_view
from shoal.errors import CheckpointError, ConfigError
from shoal.libs.sweep.command import make_overrides
from shoal.libs.sweep.display import SweepView, make_view
from shoal.libs.sweep.flow import plan_trials
from shoal.libs.sweep.loop_spec import LoopTrialSpec, load_loop_recipe
from shoal.libs.sweep.loop_trial import LoopTrial, register_trial
from shoal.libs.sweep.spec import SweepSpec, check_sweep, sweep_from_overrides
from shoal.libs.sweep.trial import TrialReport, TrialRun, TrialSetting, is_remote, load_result
from shoal.libs.sweep.trials import TrialLog, TrialState, load_history, load_sweep
from shoal.registry import Registry
from shoal.runs import RunKind, RunRecorder, Status
from shoal.search.space import SearchSpace
from shoal.train.launch.finalize import fetch_weights
from shoal.train.launch.validate import validate_run
from shoal.train.spec import TrainSpec
from typed import draw_plain

TASK = f"{Path(__file__).parents[2] / 'train_task.py'}:Toy"
SETTING = {"num_trials": 4, "metric": "accuracy", "is_higher": True, "search": "random", "scheduler": "asha"}


@pytest.fixture
def recorder() -> RunRecorder:
    return shoal.runs.create("sweep", "train: {}\nspace: {}\ntrials: 4", "s", kind=RunKind.SWEEP)


def record_trials(recorder: RunRecorder) -> None:
    log = TrialLog(recorder)
    log.begin(**SETTING)
    for number in range(4):
        log.start(number, f"s-t{number}", {"optimizer.learning_rate": 0.1 * (number + 1)})
    log.report(0, 10, 0.5, {"accuracy": 0.5, "loss": 2.0})
    log.report(0, 20, 1.0, {"accuracy": 0.8, "loss": 1.0})
    log.end(0, TrialState.FINISHED, 20, {"accuracy": 0.8, "loss": 1.0})
    log.report(1, 10, 0.5, {"accuracy": 0.9})
    log.end(1, TrialState.STOPPED, 10, {"accuracy": 0.9})
    log.end(2, TrialState.FAILED, 5, {}, "NotFinite: the loss")
    log.report(3, 10, 0.5, {"accuracy": 0.6})
    log.copy(3, 0, 20, {"optimizer.learning_rate": 0.12})
    recorder.flush()


def test_a_sweep_is_read_while_it_goes_on_and_after(recorder: RunRecorder) -> None:
    with recorder:
        record_trials(recorder)
        run = shoal.runs.load("s")
        sweep = load_sweep(run)
        assert [each.state.value for each in sweep.trials] == ["finished", "stopped", "failed", "running"]
        assert [each.number for each in sweep.rank()] == [1, 0, 3]
        best = sweep.find_best()  # a stopped one has no network
        assert best.number == 0
        last = sweep.trials[3]
        assert (last.step, last.values, last.sources) == (10, {"accuracy": 0.6}, ((0, 20),))
        assert last.parameters == {"optimizer.learning_rate": 0.12}
        assert load_history(run, 0, "accuracy") == [(0.5, 0.5), (1.0, 0.8)]
        assert load_history(run, 2, "accuracy") == []
        recorder.finish(Status.STOPPED)
    assert load_sweep(shoal.runs.load("s")).trials[3].state is TrialState.INTERRUPTED


def test_the_table_has_the_best_first(recorder: RunRecorder) -> None:
    with recorder:
        record_trials(recorder)
        view = make_view(shoal.runs.load("s"), None, ["a note"])
        drawn = run_view.make_view(shoal.runs.load("s"), None)
        assert isinstance(drawn, SweepView)
    text = draw_plain(run_view.render(view, 100))
    assert text.index("0.9") < text.index("0.8") < text.index("0.6")
    for word in ("copied trial 0", "NotFinite: the loss", "stopped", "learning_rate", "a note"):
        assert word in text
    assert "best accuracy 0.9" in view.format_plain_line()


def test_a_trial_of_another_host_passes_through_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record and its network; the driver has a home of its own."""
    monkeypatch.setenv("SHOAL_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "there"))
    reports = read_all(make_trial("t", tmp_path, is_remote=True))
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "here"))
    result = load_result("t")
    assert result.metrics == reports[-1].metrics
    fetch_weights(result, "t")
    there = tmp_path / "there/runs/t" / result.weights.name
    assert result.weights.read_bytes() == there.read_bytes()


def make_trial(run_id: str, folder: Path, *, is_remote: bool = False, **fields: object) -> TrialRun:
    stop, every = {"steps": 30}, {"every_steps": 10}
    spec = TrainSpec(task=TASK, stop=stop, evaluate=every, checkpoint=every, batch_size=32, **fields)
    return TrialRun(run_id, spec, validate_run(spec), is_remote=is_remote)


def read_all(trial: TrialRun | LoopTrial) -> list[TrialReport]:
    found = [trial.next_report()]
    while not found[-1].is_over:
        found.append(trial.next_report())
    return found


def test_a_trial_reports_its_evaluations_and_its_end_once_also_when_it_was_stopped(tmp_path: Path) -> None:
    trial = make_trial("t", tmp_path)
    reports = read_all(trial)
    assert [(each.step, round(each.progress, 3)) for each in reports] == [(10, 0.333), (20, 0.667), (30, 1), (30, 1)]
    assert [each.is_over for each in reports] == [False, False, False, True]
    assert reports[-1].metrics == load_result("t").metrics
    again = read_all(make_trial("t", tmp_path))
    assert [each.is_over for each in again] == [True]
    assert again[0].metrics == reports[-1].metrics
    assert shoal.runs.load("t").incarnation == 1
    stopped = make_trial("stopped", tmp_path)
    assert stopped.next_report().step == 10
    stopped.stop()
    assert shoal.runs.load("stopped").status is Status.STOPPED
    assert read_all(make_trial("stopped", tmp_path))[-1] == reports[-1]
    assert shoal.runs.load("stopped").last_events()["restored"]["step"] >= 10
    for path in (trial.folder / "checkpoints").glob("step-*"):
        path.rename(tmp_path / path.name)
    with pytest.raises(CheckpointError, match="step 30"):  # it never comes
        trial.copy_checkpoint(tmp_path / "copy")


def test_anothers_network_replaces_those_of_the_trial_also_in_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial, which is further on, has hyper-parameters of its own."""
    monkeypatch.setenv("SHOAL_STORE", str(tmp_path / "store"))
    donor = make_trial("donor", tmp_path)
    assert donor.next_report().step == 10
    donor.copy_checkpoint(tmp_path / "copy")
    donor.stop()
    own = {"optimizer": {"learning_rate": 0.5, "weight_decay": 0.25}}
    trial = make_trial("t", tmp_path, **own)
    assert [trial.next_report().step for _ in range(2)] == [10, 20]
    trial.stop()
    again = make_trial("t", tmp_path, **own)
    again.start_from(tmp_path / "copy")
    assert [each.step for each in read_all(again)] == [20, 30, 30]  # the donor's evaluation is not this trial's
    record = shoal.runs.load("t")
    assert record.last_events()["copied"] == {"source": "donor"}
    assert record.last_events()["restored"]["step"] == 10
    assert record.latest()["train/learning_rate"] == 0.5


def test_what_a_trial_cannot_do_is_its_end_and_not_the_sweeps(tmp_path: Path) -> None:
    notes = {"notes": str(tmp_path), "fault": "nan", "fault_step": 12}
    last = read_all(make_trial("t", tmp_path, args=notes))[-1]
    assert last.step == 10
    assert last.failure.startswith("NotFinite: the loss")
    assert shoal.runs.load("t").status is Status.FAILED
    own = read_all(make_trial("u", tmp_path, args={"notes": str(tmp_path / "u"), "fault": "raise"}))[-1]
    assert "FileNotFoundError" in own.failure


def test_a_trial_on_a_host_without_the_folder_of_the_sweep_is_an_error(tmp_path: Path) -> None:
    unused: Any = None
    setting = TrialSetting("sweep-1", unused, unused, tmp_path, tmp_path)
    with pytest.raises(ConfigError, match=r"SHOAL_HOME.*has no .*sweep-1 on .*another folder than the driver's"):
        is_remote(setting)
    (tmp_path / "runs/sweep-1").mkdir(parents=True)
    assert not is_remote(setting)


@pytest.mark.parametrize(("loop", "search"), [(object(), "random"), (None, "pbt")])
def test_a_store_carries_no_trials_of_the_loop_and_no_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: object, search: str
) -> None:
    monkeypatch.setenv("SHOAL_STORE", str(tmp_path / "store"))
    spec: Any = SimpleNamespace(loop=loop, search=search)
    setting = TrialSetting("sweep-1", spec, spec, tmp_path / "home", tmp_path)
    with pytest.raises(ConfigError, match="trials of the loop, and copies of trials"):
        is_remote(setting)
    assert is_remote(replace(setting, spec=SimpleNamespace(loop=None, search="random")))


# -- trials that are runs of the loop: they learn, report, end their actors, and go on after an end


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

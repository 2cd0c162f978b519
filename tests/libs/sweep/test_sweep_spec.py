"""A sweep that cannot work is refused before anything starts, with the field, the value and what would fit."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal.errors import ConfigError, MissingExtra
from shoal.libs.sweep.command import SweepArguments, make_overrides
from shoal.libs.sweep.spec import SweepSpec, check_sweep, sweep_from_overrides
from shoal.runs import RunKind
from shoal.runs.run_kind import infer_kind

TASK = f"{Path(__file__).parents[2] / 'train_task.py'}:Toy"
RATE = "optimizer.learning_rate=log(1e-4,1e-1)"


def spec_of(*words: str, **fields: Any) -> SweepSpec:
    """As `shoal sweep` makes it from its words."""
    overrides = [*make_overrides(TASK, words), *(f"{name}={value}" for name, value in fields.items())]
    return sweep_from_overrides(overrides)


def test_words_with_a_distribution_are_searched_and_others_are_fixed() -> None:
    spec = spec_of(RATE, "batch_size=choice(16,32)", "stop.steps=20", "args.hidden=4", trials=3)
    assert spec.search_space.describe() == {"optimizer.learning_rate": "log(0.0001,0.1)", "batch_size": "choice(16,32)"}
    assert (spec.train.stop.steps, spec.train.args, spec.trials) == (20, {"hidden": 4}, 3)
    assert spec == SweepSpec.from_yaml(spec.to_yaml())
    assert infer_kind(spec.to_yaml()) is RunKind.SWEEP


def test_a_trial_is_the_spec_with_its_values() -> None:
    spec = spec_of(RATE, "args.hidden=int(2,9)", "optimizer.name=choice(adam,sgd)", "stop.steps=20", "args.count=64")
    trial = spec.make_trial_spec({"optimizer.learning_rate": 0.5, "args.hidden": 3, "optimizer.name": "sgd"})
    assert (trial.optimizer.learning_rate, trial.optimizer.name, trial.optimizer.momentum) == (0.5, "sgd", 0.9)
    assert (trial.args, trial.stop.steps) == ({"hidden": 3, "count": 64}, 20)


def test_an_argument_of_the_task_is_searched_by_its_name_alone() -> None:
    assert spec_of("hidden=int(1,4)", "stop.steps=5").make_trial_spec({"hidden": 3}).args["hidden"] == 3


def test_a_recipes_target_is_left_out_unless_it_is_said() -> None:
    words = make_overrides("lenet", (RATE,))
    assert sweep_from_overrides(words).train.stop.target is None
    said = sweep_from_overrides([*words, "train.stop.target=accuracy>=0.8"]).train.stop.target
    assert said.value == 0.8


def test_the_metric_and_its_direction_are_found() -> None:
    checked = check_sweep(spec_of(RATE, "stop.steps=20"))
    assert (checked.metric, checked.is_higher, checked.total_steps) == ("accuracy", True, 20)
    checked = check_sweep(spec_of(RATE, "stop.steps=20", metric="loss"))
    assert (checked.metric, checked.is_higher) == ("loss", False)


STOP = "stop.steps=20"
ASHA = {"scheduler": "asha"}
PBT = {"search": "pbt"}


@pytest.mark.parametrize(
    ("words", "fields", "problem"),
    [
        ((STOP,), {}, "is empty"),
        (("optimizer.learning_rate=lgo(1,2)", STOP), {}, "'lgo' is no distribution"),
        (("optimizer.lerning_rate=log(1e-4,1)", STOP), {}, "no such field. did you mean 'optimizer.learning_rate'"),
        (("optimizer.learning_rate=uniform(-1,1)", STOP), {}, "greater than 0"),
        (("optimizer.name=choice(adam,adamm)", STOP), {}, "optimizer.name = 'adamm'"),
        (("args.hiden=int(1,4)", STOP), {}, "args.hiden"),
        (("hiden=int(1,4)", STOP), {}, "no such field. did you mean 'hidden'"),
        (("workers=choice(1,2)", STOP), {}, "is the same in all trials"),
        ((RATE,), {}, "nothing says when to end"),
        ((RATE, STOP), {"metric": "f1"}, "is not evaluated. there is loss, accuracy"),
        ((RATE, STOP), {"search": "bohb", "scheduler": "none"}, "use --scheduler asha"),
        ((RATE, STOP), PBT | ASHA, "leave it out with --search pbt"),
        ((RATE, STOP), PBT | {"trials": 1}, "no trial to copy"),
        ((RATE, STOP), PBT | {"concurrent": 1}, "take turns"),
        (("batch_size=choice(8,16)", "optimizer.name=choice(adam,sgd)", STOP), PBT, "cannot change while"),
        ((RATE, "dropout=uniform(0,0.5)", STOP), PBT, "evaluate.every_steps=2"),
        ((RATE, "stop.wall_s=9"), ASHA, "give stop.steps=1000"),
        ((RATE, STOP, "evaluate.every_steps=20"), ASHA, "too late for --scheduler asha"),
    ],
)
def test_what_cannot_work_is_refused(
    words: tuple[str, ...], fields: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find("torch" if name == "optuna" else name))
    with pytest.raises(ConfigError) as caught:
        check_sweep(spec_of(*words, **fields))
    assert problem in str(caught.value)


OWN_OPTIMIZER = f"""
import sys, torch
sys.path.insert(0, {str(Path(TASK).parent)!r})
from train_task import Toy
class Own(Toy):
    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.1)
"""


@pytest.mark.parametrize("rates", ["log(1e-4,1e-2)", "choice(1e-2,1e-3)"])  # the middle of each is the default
def test_a_field_that_the_tasks_own_optimizer_ignores_is_not_searched(rates: str, tmp_path: Path) -> None:
    (task := tmp_path / "own.py").write_text(OWN_OPTIMIZER)
    words = make_overrides(f"{task}:Own", [f"optimizer.learning_rate={rates}", STOP])
    with pytest.raises(ConfigError, match=r"optimizer.learning_rate = .*Own has an optimizer of its own.*args.rate="):
        check_sweep(sweep_from_overrides(words))
    check_sweep(sweep_from_overrides(make_overrides(f"{task}:Own", ["batch_size=choice(8,16)", STOP])))


def test_python_is_refused_before_a_cluster_starts() -> None:
    space = {"optimizer.learning_rate": "log(1e-4,1e-1)"}
    with pytest.raises(ConfigError, match="is not evaluated"):
        shoal.sweep(TASK, space, metric="f1", train={"stop": {"steps": 20}})
    with pytest.raises(ConfigError, match="no such field"):
        shoal.sweep(TASK, space, trails=3)


def test_optuna_that_is_not_installed_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'optuna>=4'"):
        check_sweep(spec_of(RATE, STOP, search="optuna"))


def test_the_command_is_what_was_typed_or_what_goes_on() -> None:
    typed = SweepArguments("sweep", ("trials=4",), 0, None, command=("lenet", RATE, "--trials", "4"))
    assert typed.to_command_line() == f"shoal sweep lenet '{RATE}' --trials 4"
    resumed = SweepArguments("sweep", ("resume=abc",), 0, "local", command=("lenet",))
    assert resumed.to_command_line() == "shoal sweep --resume abc --address local"


def test_the_values_of_a_trial_follow_from_seed_and_number() -> None:
    from shoal.libs.sweep.flow import plan_trials
    from shoal.libs.sweep.trials import SweepTrial, TrialState

    spec = spec_of(RATE, STOP, trials=4, seed=5)
    planned = plan_trials(spec, ())
    assert [each.number for each in planned] == [0, 1, 2, 3]
    assert planned[2].parameters == spec.search_space.sample(np.random.default_rng([5, 2]))
    known = [
        SweepTrial(0, "a", planned[0].parameters, TrialState.FINISHED),
        SweepTrial(1, "b", {"optimizer.learning_rate": 0.5}, TrialState.INTERRUPTED),
        SweepTrial(2, "c", planned[2].parameters, TrialState.STOPPED),
    ]
    failed = SweepTrial(3, "d", {"optimizer.learning_rate": 0.1}, TrialState.FAILED, failure="NotFinite")
    assert [each.number for each in plan_trials(spec, [*known, failed])] == [1]
    again = plan_trials(spec.update({"retry_failed": True}), [*known, failed])
    assert [(each.number, each.parameters) for each in again] == [
        (1, {"optimizer.learning_rate": 0.5}),
        (3, {"optimizer.learning_rate": 0.1}),
    ]
    left = plan_trials(spec, known)
    assert [(each.number, each.parameters) for each in left] == [
        (1, {"optimizer.learning_rate": 0.5}),
        (3, planned[3].parameters),
    ]

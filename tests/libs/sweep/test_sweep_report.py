"""The pictures of sweeps show what the frames hold, and enter the report."""

import json
import math
import shlex

import numpy as np
import pytest
from pandas import DataFrame, Series

from shoal import runs
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.libs.sweep.report import build_panels, compute_importance, draw_scores
from shoal.libs.sweep.trials import SweepTrial, TrialLog, TrialState, list_best_commands
from shoal.runs import RunKind


def make_trials(num_trials: int = 60) -> DataFrame:
    rng = np.random.default_rng(0)
    return DataFrame(
        {
            "rate": 10 ** rng.uniform(-4, 0, num_trials),
            "name": rng.choice(["adam", "sgd"], num_trials),
            "is_deep": rng.random(num_trials) < 0.5,
            "idle": rng.random(num_trials),
        }
    )


def test_importance_is_the_share_of_the_variance() -> None:
    """score = 2 a + b with a, b uniform: shares of 4/5 and 1/5; the forest's error is a tenth here."""
    rng = np.random.default_rng(0)
    trials = DataFrame({"b": rng.random(300), "idle": rng.random(300), "a": rng.random(300)})
    found = compute_importance(trials, 2 * trials["a"] + trials["b"])
    assert list(found["parameter"]) == ["a", "b", "idle"]
    assert found["importance"].to_numpy() == pytest.approx([0.8, 0.2, 0.0], abs=0.1)
    again = compute_importance(trials, 2 * trials["a"] + trials["b"])
    assert again.equals(found)


def test_importance_is_known_of_logarithms_texts_and_booleans() -> None:
    trials = make_trials()
    for parameter, scores in {
        "rate": -np.abs(np.log10(trials["rate"]) + 2),
        "name": (trials["name"] == "adam").astype(float),
        "is_deep": trials["is_deep"].astype(float),
    }.items():
        found = compute_importance(trials, scores)
        assert found["parameter"][0] == parameter
        assert found["importance"][0] > 0.8


def test_importance_is_none_where_nothing_can_be_said() -> None:
    trials, scores = make_trials(9), Series(np.arange(9.0))
    assert compute_importance(trials, scores) is not None
    scores[[0, 1]] = math.nan
    assert compute_importance(trials, scores) is None  # seven are left
    assert compute_importance(make_trials(20), Series(np.ones(20))) is None


def test_the_score_is_drawn_over_each_parameter() -> None:
    trials = make_trials(5).assign(name=["sgd", "adam", "sgd", "sgd", "adam"])
    scores = Series([0.1, 0.9, math.nan, 0.5, 0.3], index=trials.index)
    rate, name, *_ = draw_scores(trials, scores, None)
    assert (rate.title, rate.scale, name.scale, name.note) == ("score by rate", "x", "", "0: adam, 1: sgd")
    assert list(rate.lines[0].xs) == sorted(trials["rate"])
    assert rate.lines[0].ys[trials["rate"].argsort().tolist().index(1)] == 0.9
    assert [each.scale for each in draw_scores(trials, scores, {"idle"})] == ["", "", "", "x"]


def record_sweep(run: runs.RunRecorder, num_trials: int) -> None:
    log = TrialLog(run)
    log.begin(num_trials=40, metric="validation/accuracy", is_higher=True, search="random", scheduler="asha")
    for number, (_, parameters) in enumerate(make_trials(num_trials).iterrows()):
        log.start(
            number,
            f"one-{number}",
            {name: getattr(value, "item", lambda v=value: v)() for name, value in parameters.items()},
        )
        score = -abs(math.log10(parameters["rate"]) + 2)
        log.report(number, 10, 1.0, {"validation/accuracy": score})
        if number:
            log.end(number, TrialState.FINISHED, 10, {"validation/accuracy": score})


def test_a_sweep_has_its_trials_and_their_importance_in_the_report() -> None:
    spec = "train:\n  task: mine.py:Task\n  stop:\n    steps: 500\n"
    with runs.create("sweep", spec, "one", kind=RunKind.SWEEP) as run:
        record_sweep(run, 120)
        run.record_model("mine", 3, ["champion"])
    page = runs.write_report(runs.load("one")).read_text()
    for told in (
        "120 of 40",
        "importance of the parameters",
        "one-119",
        "shoal serve deploy mine@3",
    ):
        assert told in page, told
    best, table, importance, *_ = build_panels(runs.load("one"))
    assert importance.counts[0].name == "rate"
    assert len(table.rows) == 120  # all of them
    assert table.rows[0][1][0] in best.note
    number, rate = table.rows[0][0], table.rows[0][table.header.index("rate")]
    assert best.note.startswith(f"trial {number}, validation/accuracy")
    (again,) = (
        each for each in best.commands if each.startswith("shoal run train task=mine.py:Task stop.steps=500 rate=")
    )
    assert f"{float(again.split('rate=')[1].split()[0]):.3g}" == f"{float(rate):.3g}"


def test_the_best_trial_of_a_loop_is_run_again_by_words_that_its_job_takes() -> None:
    loop = {"recipe": "actor_learner", "actors": 3, "stop": {"steps": 9}, "env": "Acrobot-v1", "model_name": "mine"}
    with runs.create("sweep", f"loop: {json.dumps(loop)}", "one", kind=RunKind.SWEEP) as run:
        record_sweep(run, 3)
    trial = SweepTrial(0, "one-000", {"algorithm.learning_rate": 0.01})
    *_, again = list_best_commands(runs.load("one"), trial)
    command, _, words = again.partition(" --actors 3 ")
    assert command == "shoal run actor_learner"
    spec = ActorLearnerSpec().override(shlex.split(words))
    assert (spec.env, spec.model_name, spec.algorithm.learning_rate) == ("Acrobot-v1", "mine", 0.01)


def test_a_sweep_of_few_trials_says_what_importance_needs() -> None:
    with runs.create("sweep", "", "one", kind=RunKind.SWEEP) as run:
        record_sweep(run, 3)
    panels = build_panels(runs.load("one"))
    assert [panel.title for panel in panels] == [
        *("best trial", "all trials", "importance of the parameters", "score by rate", "score by name"),
        *("score by is_deep", "score by idle"),
    ]
    assert panels[2].note == "needs 8 trials with different scores"
    assert [row[0] for row in panels[1].rows if ("interrupted", "warn") in row] == ["0"]

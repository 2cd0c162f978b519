"""A sweep on a cluster: trials end early, copy others, and survive their driver, which is killed in the middle."""

from __future__ import annotations

import os
import signal
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import shoal.runs
from fake_cluster import FakeRequest, replace_cluster
from leftovers import children_of, pids_of, still_alive
from shoal.cluster.admission import RunAdmission
from shoal.cluster.growth import Growth, NodeType
from shoal.errors import NoCapacity, PlanError, RunError
from shoal.libs.sweep.flow import run_sweep
from shoal.libs.sweep.ray_sweep import make_scheduler
from shoal.libs.sweep.spec import SweepSpec, check_sweep
from shoal.libs.sweep.trials import SWEEPING, Sweep, TrialState, load_sweep
from shoal.registry import Registry
from shoal.runs import RunKind, Status, list_runs
from shoal_program import Program
from waiting import wait_for

if TYPE_CHECKING:
    from pathlib import Path

    from shoal.cluster.embedded_cluster import EmbeddedCluster

RUN = "sweep-killed"
WORDS = [
    *("train.task=tests/train_task.py:Held", "train.stop.steps=80", "train.threads=1"),
    *("train.evaluate.every_steps=10", "train.checkpoint.every_steps=10", "train.name=swept", "trials=2"),
    *("concurrent=2", 'space={"optimizer.learning_rate": "log(1e-3,1e-1)", "hidden": "int(4,999)"}'),
]


def read() -> Sweep | None:
    try:
        run = shoal.runs.load(RUN)
    except RunError:
        return None
    return load_sweep(run) if SWEEPING in run.last_events() else None


def is_half_done() -> bool:
    """One trial has finished, and the other, which is held at a step, is past a checkpoint."""
    sweep = read()
    others = [] if sweep is None else [each for each in sweep.trials if each.state is TrialState.RUNNING]
    return sweep is not None and len(sweep.trials) == 2 and len(others) == 1 and others[0].step >= 20


ASHA = {"scheduler": "asha", "trials": 4}
PBT = {"search": "pbt", "trials": 2, "cpus_per_trial": 8.0}  # of a cluster of 8: the trials take turns


def test_trials_run_on_nodes_that_are_still_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from shoal.libs.sweep import ray_sweep

    def count(**fields: object) -> int:
        train = {name: fields.pop(name) for name in ("workers", "wait") if name in fields}
        spec = SweepSpec.parse({"train": {"task": "t.py:T", **train}, **fields})
        with RunAdmission("sweep") as admission:
            return ray_sweep.count_concurrent_trials(spec, lambda kind, **details: None, admission)

    replace_cluster(monkeypatch, Growth({}, (NodeType("big", {"CPU": 4.0}, 2),)))
    there: dict[str, float] = {}
    monkeypatch.setattr(ray, "cluster_resources", lambda: there)
    monkeypatch.setattr(ray, "available_resources", lambda: there)
    monkeypatch.setattr(FakeRequest, "answers", [False, True, True, False])
    assert count(cpus_per_trial=2) == 4
    assert count(workers=3, trials=2, concurrent=1, wait="5m") == 1
    assert FakeRequest.asked == [[{"CPU": 2.0}], [{"CPU": 1.0}] * 3]
    with pytest.raises(NoCapacity, match="a trial needs 1 CPU, and has waited 0 s: no nodes came; 0 of 0 CPUs free"):
        count(wait=0)
    with pytest.raises(PlanError, match=r"its autoscaler may add no more than 2 big \(4 CPU\)"):
        count(cpus_per_trial=5)
    there["CPU"] = 4.0
    assert count(cpus_per_trial=2) == 4, "the nodes that are there need no wait"
    assert len(FakeRequest.asked) == 3
    replace_cluster(monkeypatch, Growth({"CPU": 4.0}))
    assert count(cpus_per_trial=2) == 2


@pytest.mark.soak
def test_a_trial_that_cannot_start_fails_alone(cluster: EmbeddedCluster) -> None:
    train = {"task": "tests/train_task.py:Toy", "stop": {"steps": 10}, "evaluate": {"every_steps": 5}, "threads": 1}
    spec = SweepSpec.parse({"train": train, "space": {"args.count": [-5, 256]}, "registers": False, "trials": 4})
    sweep = load_sweep(shoal.runs.load(run_sweep(spec)))
    states = {each.parameters["args.count"]: each.state for each in sweep.trials}
    assert len(sweep.trials) == 4
    assert states == {-5: TrialState.FAILED, 256: TrialState.FINISHED}


@pytest.mark.parametrize("more", [ASHA, pytest.param(PBT, marks=pytest.mark.soak)], ids=["asha", "pbt"])
def test_trials_end_early_or_copy_others(cluster: EmbeddedCluster, more: dict[str, Any]) -> None:
    every = {"every_steps": 5}
    train = {"task": "tests/train_task.py:Toy", "stop": {"steps": 40}, "evaluate": every, "threads": 1}
    space = {"optimizer.learning_rate": [1e-9, 0.02]}
    spec = SweepSpec.parse({"train": train, "space": space, "registers": False, "seed": 1, **more})
    sweep = load_sweep(shoal.runs.load(run_sweep(spec)))
    states = [each.state for each in sweep.trials]
    best = sweep.find_best()
    # What PBT has copied may have the other rate by now, and the score that it was copied with.
    assert best.parameters["optimizer.learning_rate"] == 0.02 or best.sources
    if spec.search == "pbt":
        copied = [each for each in sweep.trials if each.sources]
        assert states == [TrialState.FINISHED] * 2
        assert copied
        own = shoal.runs.load(copied[0].run_id)
        assert own.last_events()["copied"]["source"] == sweep.trials[copied[0].sources[-1][0]].run_id
    else:
        assert TrialState.STOPPED in states
        stopped = next(each for each in sweep.trials if each.state is TrialState.STOPPED)
        assert stopped.step < 40
        assert shoal.runs.load(stopped.run_id).status is Status.STOPPED


def test_a_sweep_whose_driver_is_killed_goes_on(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    env = {**os.environ, **cluster.environment, "SHOAL_RUN_ID": RUN, "OMP_NUM_THREADS": "1"}
    with Program([sys.executable, "jobs/sweep.py", *WORDS, f"train.args.folder={tmp_path}"], env=env) as program:
        wait_for(is_half_done, what="a trial to finish")
        program.process.send_signal(signal.SIGKILL)
        program.wait()
    before = read()
    finished = {each.number: each for each in before.trials if each.state is TrialState.FINISHED}
    assert len(finished) == 1
    (tmp_path / "go").touch()
    del env["SHOAL_RUN_ID"]
    with Program([sys.executable, "jobs/sweep.py", f"resume={RUN}"], env=env) as program:
        assert program.wait() == 0
    record, after = shoal.runs.load(RUN), read()
    assert (record.status, record.kind, record.incarnation) == (Status.FINISHED, RunKind.SWEEP, 2)
    assert [each.state for each in after.trials] == [TrialState.FINISHED] * 2
    for trial in after.trials:
        own = shoal.runs.load(trial.run_id)
        assert own.incarnation == (1 if trial.number in finished else 2)
        assert trial.parameters == before.trials[trial.number].parameters
        if trial.number not in finished:
            assert own.last_events()["restored"]["step"] >= 10
    best = after.find_best()
    manifest = Registry().get("swept@1").manifest
    assert manifest.lineage == {
        **{"sweep": RUN, "trial": best.number, "run": best.run_id},
        "parameters": best.parameters,
    }
    assert manifest.model.kwargs["args"]["hidden"] == best.parameters["hidden"]


LOOP_WORDS = [
    *("loop.recipe=tests/sign_job.py", "loop.actors=1", "loop.stop.steps=20000", "loop.learner.checkpoint_every_s=0.5"),
    *("trials=2", "concurrent=1", 'space={"algorithm.learning_rate": "log(1e-3,3e-2)"}'),
]


@pytest.mark.soak
def test_no_actor_outlives_its_trial_whose_process_is_killed_and_the_trial_goes_on(cluster: EmbeddedCluster) -> None:
    def find_trial() -> psutil.Process | None:
        """The process of the first trial, once its learner has saved."""
        folder = shoal.runs.load("loops-t000").folder if "loops-t000" in {each.id for each in list_runs()} else None
        is_saved = folder is not None and any((folder / "checkpoints").glob("step-*"))
        actors = pids_of(cluster, "shoal.actor") if is_saved else []
        return psutil.Process(actors[0]).parent() if actors else None

    env = {**os.environ, **cluster.environment, "SHOAL_RUN_ID": "loops", "OMP_NUM_THREADS": "1"}
    with Program([sys.executable, "jobs/sweep.py", *LOOP_WORDS], env=env) as program:
        wait_for(lambda: find_trial() is not None, what="a trial that has learnt something")
        trial = find_trial()
        actors = children_of(trial.pid, "shoal.actor")
        assert len(actors) == 1
        trial.kill()
        wait_for(lambda: still_alive(actors) == [], what="the actor to end")
        assert program.wait() == 0
    sweep = load_sweep(shoal.runs.load("loops"))
    assert [each.state for each in sweep.trials] == [TrialState.FINISHED] * 2
    assert all(each.get_score("mean_return") > 4.0 for each in sweep.trials)
    assert shoal.runs.load("loops-t000").incarnation == 2
    assert pids_of(cluster, "shoal.actor") == []
    best = sweep.find_best()
    assert Registry().get("signgame@champion").manifest.lineage == {
        **{"sweep": "loops", "trial": best.number, "run": best.run_id},
        "parameters": best.parameters,
    }


@pytest.mark.parametrize(("score", "decision"), [(0.1, "STOP"), (0.95, "CONTINUE")])
def test_the_rungs_of_a_resumed_sweep_have_its_earlier_trials(score: float, decision: str) -> None:
    train = {"task": "tests/train_task.py:Toy", "stop": {"steps": 40}, "evaluate": {"every_steps": 5}}
    space = {"optimizer.learning_rate": [1e-9, 0.02]}
    spec = SweepSpec.parse({"train": train, "space": space, "scheduler": "asha"})
    checked, new = check_sweep(spec), SimpleNamespace(trial_id="new")
    result = {"progress": 0.2, "value/accuracy": score}
    histories = [(number, [(0.2, 0.9 - number / 10)]) for number in range(3)]
    for earlier, expected in (([], "CONTINUE"), (histories, decision)):
        scheduler = make_scheduler(spec, checked, None, 2, earlier)
        scheduler.on_trial_add(None, new)
        assert scheduler.on_trial_result(None, new, result) == expected

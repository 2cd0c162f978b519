"""Campaigns: the same seed draws the same faults, a violation is shortened, and promises that are broken are seen."""

import json
import sqlite3
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

import shoal.runs
from shoal.errors import ConfigError
from shoal.libs.chaos.plan import ACTOR_LINK, LOOP, ROLES, STORE, Fault, draw_faults, require_links, shrink
from shoal.libs.chaos.promises import check_accounts, check_checkpoints, check_metric, check_versions
from shoal.libs.chaos.striker import Striker
from shoal.runs import Run, RunKind
from waiting import wait_for

ACCOUNTS = {"received": 7, "consumed": 4, "queued": 0, "dropped": {"gateway_crash": 3, "stale": 0}, "balanced": True}


def test_a_seed_draws_its_faults_again_and_each_clock_only_grows() -> None:
    faults = draw_faults(7, 40, LOOP)
    assert faults == draw_faults(7, 40, LOOP)
    assert faults != draw_faults(8, 40, LOOP)
    for clock in LOOP.gaps:
        moments = [each.at for each in faults if each.clock == clock]
        assert moments == sorted(set(moments))
    assert {each.seconds > 0 for each in faults if each.kind == "kill"} == {False}


def test_links_have_faults_of_their_own() -> None:
    faults = draw_faults(7, 200, LOOP, [STORE, ACTOR_LINK])
    assert {each.kind for each in faults if each.target == STORE} == {"partition", "slow", "errors"}
    assert {each.kind for each in faults if each.target == ACTOR_LINK} == {"partition", "slow", "cut"}
    assert {each.target for each in draw_faults(7, 20, LOOP, [ACTOR_LINK], kinds=["slow"])} == {ACTOR_LINK}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"targets": ["lerner"]}, "did you mean 'learner'"),
        ({"kinds": ["kil"]}, "did you mean 'kill'"),
        ({"kinds": ["cut"]}, "is no fault of gateway"),
    ],
)
def test_what_cannot_be_struck_is_refused_by_name(given: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        draw_faults(0, 3, LOOP, **given)  # type: ignore[arg-type]


def test_faults_of_a_link_that_is_not_there_are_refused() -> None:
    fault = Fault("partition", STORE, "step", 1, seconds=2.0)
    require_links([fault], [STORE])
    with pytest.raises(ConfigError, match="store needs SHOAL_STORE"):
        require_links([fault], [ACTOR_LINK])


def test_a_second_fault_of_one_process_prolongs_the_first() -> None:
    child = subprocess.Popen(["sleep", "60"])
    striker = Striker(lambda: [psutil.Process(child.pid)], {}, print)
    striker.faults = [Fault("pause", "sleeper", "step", at, seconds=600.0) for at in (1, 2)]
    ROLES["sleeper"] = "^sleep"
    try:
        striker.follow({"step": 2})
        assert [each.victim for each in striker.strikes] == [f"process {child.pid}"] * 2
        wait_for(lambda: psutil.Process(child.pid).status() == psutil.STATUS_STOPPED, what="a stopped process")
        assert not striker.is_over
        striker.remedy(everything=True)
        wait_for(lambda: psutil.Process(child.pid).status() != psutil.STATUS_STOPPED, what="a process that goes on")
        assert striker.is_over
    finally:
        del ROLES["sleeper"]
        child.kill()
        child.wait()


def test_a_learner_that_goes_on_from_an_older_checkpoint_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    with shoal.runs.create("loop", "{}", kind=RunKind.LOOP) as recorder:
        recorder.record_event("learner_restarted", restored_updates=5, updates=9)
    run = shoal.runs.load(recorder.id)
    (promise,) = check_checkpoints(run, [(run.created_at, 7)])
    assert promise.evidence == "step 7 was saved, and step 5 restored"


@pytest.mark.parametrize("guilty", [{3}, {0, 39}, {5, 6, 30}])
def test_a_violation_is_shortened_to_the_faults_that_cause_it(guilty: set[int]) -> None:
    faults = draw_faults(1, 40, LOOP)
    needed = [faults[index] for index in sorted(guilty)]
    tried: list[int] = []

    def is_violated(fewer: Sequence[Fault]) -> bool:
        tried.append(len(fewer))
        return all(each in fewer for each in needed)

    assert shrink(faults, is_violated) == needed
    assert len(tried) < 150


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    with shoal.runs.create("loop", "{}") as recorder:
        for version, step in [(1, 0), (2, 10), (3, 20)]:
            recorder.record_weights(version, step, "0" * 64, published_at=100.0 + version)
        for step, loss in [(10, 0.5), (20, 0.25)]:
            recorder.log(step, {"train/loss": loss})
        recorder.record_event("restored", step=20)
        recorder.record_event("accounting", **ACCOUNTS)
    return shoal.runs.load(recorder.id)


def test_promises_that_were_kept_have_their_evidence(run: Run) -> None:
    found = [
        *(*check_accounts(run), *check_versions(run), *check_checkpoints(run, [(run.created_at, 20)])),
        check_metric(run, run, "train/loss"),
    ]
    assert [each.is_satisfied for each in found] == [True] * 4
    assert found[0].evidence == "received 7, learned 4, queued 0, dropped {'gateway_crash': 3}"


def test_a_metric_that_nobody_recorded_is_equal_to_none(run: Run) -> None:
    assert not check_metric(run, run, "train/los").is_satisfied


def test_a_ledger_that_forgets_a_segment_is_found(run: Run) -> None:
    change_event(run, "accounting", ACCOUNTS | {"consumed": 3})
    (promise,) = check_accounts(run)
    assert not promise.is_satisfied


def change_event(run: Run, kind: str, details: dict[str, Any]) -> None:
    with sqlite3.connect(run.folder.parents[1] / "runs.sqlite") as connection:
        connection.execute("UPDATE events SET details = ? WHERE kind = ?", (json.dumps(details), kind))


def test_a_version_that_comes_twice_and_a_step_that_is_lost_are_found(run: Run) -> None:
    with sqlite3.connect(run.folder.parents[1] / "runs.sqlite") as connection:
        connection.execute("UPDATE versions SET time = time + 100 WHERE version = 2")
    change_event(run, "restored", {"step": 19})
    assert not next(check_versions(run)).is_satisfied
    (promise,) = check_checkpoints(run, [(run.created_at, 20)])
    assert promise.evidence == "step 20 was saved, and step 19 restored"

"""Campaigns: the same seed draws the same faults, a violation is shortened, and promises that are broken are seen."""

import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest

import shoal.runs
from shoal.errors import ConfigError
from shoal.libs.chaos.plan import LOOP, Fault, draw_faults, shrink
from shoal.libs.chaos.promises import check_accounts, check_checkpoints, check_losses, check_versions
from shoal.rl.experience.segment_ledger import Ledger
from shoal.runs import Run
from shoal.wire import DropReason

KEY = ("actor-0", 1)


def test_a_seed_draws_its_faults_again_and_each_clock_only_grows() -> None:
    faults = draw_faults(7, 40, LOOP)
    assert faults == draw_faults(7, 40, LOOP)
    assert faults != draw_faults(8, 40, LOOP)
    for clock in LOOP.gaps:
        moments = [each.at for each in faults if each.clock == clock]
        assert moments == sorted(set(moments))
    assert {each.seconds > 0 for each in faults if each.kind == "kill"} == {False}


@pytest.mark.parametrize(
    ("given", "message"),
    [({"targets": ["lerner"]}, "did you mean 'learner'"), ({"kinds": ["kil"]}, "did you mean 'kill'")],
)
def test_what_cannot_be_struck_is_refused_by_name(given: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        draw_faults(0, 3, LOOP, **given)  # type: ignore[arg-type]


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
    ledger = Ledger(recorder.folder / "ledger.sqlite")
    for seq in range(4):
        ledger.record_received(KEY, seq)
    ledger.close()
    return shoal.runs.load(recorder.id)


def test_promises_that_were_kept_have_their_evidence(run: Run) -> None:
    dropped_at_the_crash = Ledger(run.folder / "ledger.sqlite")  # all that was queued
    assert dropped_at_the_crash.get_account(KEY).dropped[DropReason.GATEWAY_CRASH] == 4
    dropped_at_the_crash.close()
    found = [
        *check_accounts(run),
        *check_versions(run),
        *check_checkpoints(run, [(run.created_at, 20)]),
        check_losses(run, run, "train/loss"),
    ]
    assert [each.is_held for each in found] == [True] * 4
    assert found[0].evidence == "received 4 = learned 0 + dropped 4 {'gateway_crash': 4}"


@pytest.mark.parametrize(
    ("statement", "promise"),
    [
        ("UPDATE accounts SET consumed = consumed - 1", "sent = learned"),  # it forgets one
        ("UPDATE accounts SET next_seq = next_seq + 1", "sent = learned"),
    ],
)
def test_a_ledger_that_forgets_a_segment_is_found(run: Run, statement: str, promise: str) -> None:
    Ledger(run.folder / "ledger.sqlite").close()
    with sqlite3.connect(run.folder / "ledger.sqlite") as connection:
        connection.execute(statement)
    (finding,) = check_accounts(run)
    assert not finding.is_held
    assert finding.promise.startswith(promise)


def test_a_version_that_comes_twice_and_a_step_that_is_lost_are_found(run: Run) -> None:
    with sqlite3.connect(run.folder.parents[1] / "runs.sqlite") as connection:
        connection.execute("UPDATE versions SET time = time + 100 WHERE version = 2")
        connection.execute("""UPDATE events SET details = '{"step": 19}' WHERE kind = 'restored'""")
    assert not next(check_versions(run)).is_held
    (finding,) = check_checkpoints(run, [(run.created_at, 20)])
    assert finding.evidence == "step 20 was saved, and step 19 restored"

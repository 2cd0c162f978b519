"""What a release has left on disk is read by this one, and goes on: `written.py` wrote an archive for each release."""

from __future__ import annotations

import shutil
from operator import attrgetter
from pathlib import Path

import pytest

import shoal.runs
from rl_setting import EXPERIENCE
from shoal.libs.demonstrations.files import DemonstrationFiles
from shoal.libs.stream.batch_log import read_batches
from shoal.libs.stream.flow import run_stream
from shoal.libs.stream.spec import StreamSpec
from shoal.rl.experience.segment_log import SegmentLog
from shoal.store import open_store
from shoal.testing import Loop
from written import FOLDER, GAME, NUM_LEARNT, NUM_MESSAGES, NUM_STEPS


@pytest.fixture(params=sorted(FOLDER.glob("*.zip")), ids=attrgetter("stem"))
def home(request: pytest.FixtureRequest, shoal_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """$SHOAL_HOME of a release, which is this folder too."""
    shutil.unpack_archive(request.param, shoal_home)
    monkeypatch.chdir(shoal_home)
    return shoal_home


def find_run(kind: shoal.runs.RunKind) -> shoal.runs.Run:
    (run,) = (run for run in shoal.runs.list_runs() if run.kind is kind)
    assert run.status is shoal.runs.Status.FINISHED
    return run


def test_a_run_goes_on_from_its_checkpoint_and_its_model_answers(home: Path) -> None:
    run = find_run(shoal.runs.RunKind.TRAINING)
    assert run.latest()["train/step"] == NUM_STEPS
    assert run.models()["name"].tolist() == ["line"]
    assert shoal.load("line@champion").predict([[0.5]])["output"].item() == pytest.approx(2.0, abs=0.1)
    again = shoal.fit("line.py:Line", name="line", resume=run.id, stop={"steps": NUM_STEPS + 10}, say=None)
    run = shoal.runs.load(again.run_id)
    assert (run.incarnation, run.last_events()["restored"]["step"]) == (2, NUM_STEPS)
    assert run.latest()["train/step"] == NUM_STEPS + 10


def test_a_stream_goes_on_after_its_log(home: Path) -> None:
    run = find_run(shoal.runs.RunKind.STREAM)
    assert sum(len(batch.messages) for batch in read_batches(run.folder / "log")) == NUM_LEARNT
    run_stream(StreamSpec.from_record(run.spec).override([f"resume={run.id}", "max_messages=null"]))
    assert shoal.runs.load(run.id).last_events()["trained"]["steps"] == NUM_MESSAGES


def test_a_loop_goes_on_with_its_accounts_and_episodes(home: Path) -> None:
    with Loop("CartPole-v1", home / "loop", *GAME) as loop:
        totals = loop.ledger.get_totals()
        assert totals.is_balanced
        assert totals.consumed > 0
        assert loop.learner.stats()["updates"] > 0
    episodes = DemonstrationFiles([open_store(home / "loop/episodes")]).read_sound()
    assert all(each.info.episode_return == each.info.num_steps for each in episodes.values())
    assert episodes
    recovered = SegmentLog(open_store(home / "store"), EXPERIENCE).recover()
    assert [(each.key, each.seq) for each in recovered.segments] == [(("actor", 1), seq) for seq in range(3)]

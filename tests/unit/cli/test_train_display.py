"""What `shoal run` shows of a training run, on a terminal and in a log file."""

import dataclasses
import math

import pytest

from shoal import runs
from shoal.cli.display.train_display import TrainView, make_view
from typed import draw_plain

METRICS = {
    "train/step": 123_456.0,
    "train/epoch": 87.65,
    "train/loss": 0.001234,
    "step/seconds": 0.25,
    "samples/per_s": 1_234_567.0,
    "wait/data": 1.0,
    "wait/communication": 0.182,
    "flops/utilisation": 0.172,
    "validation/loss": 0.5,
    "validation/accuracy": 0.8659,
}
SETTING = {"plan": "data 2 sharded x tensor 2", "device": "cuda", "parameters": 1_234_567_890}
VIEW = TrainView(
    run_id="20261120-101010-abcd",
    phase="training",
    elapsed_s=73.0,
    metrics=METRICS,
    setting={**SETTING, "total_steps": 1_000_000, "workers": 4},
    history=(3.0, 2.0, 1.0),
)


def shown(view: TrainView, width: int = 100) -> str:
    return draw_plain(view.render(), width)


@pytest.mark.parametrize("width", [80, 100])
def test_everything_that_matters_is_on_the_picture_and_no_line_is_broken(width: int) -> None:
    text = shown(VIEW, width)
    for word in (
        *("20261120-101010-abcd", "training", "73 s", "123,456", "of 1,000,000", "epoch 87.65", "2 d 12 h to go"),
        *("0.001234", "samples/s 1,234,567", "data wait 100%", "communication 18.2%", "MFU 17.2%"),
        *("accuracy 0.8659", "loss 0.5", "tensor 2 on cuda, 1,234,567,890 parameters"),
    ):
        assert word in text, word
    lines = text.splitlines()
    assert {len(line) for line in lines} == {width}
    assert len(lines) == 2 + 5  # the frame; step, loss, rates, evaluation, plan


def test_the_bar_is_as_long_as_the_way_that_is_done() -> None:
    assert VIEW.progress == pytest.approx(0.123456)
    assert VIEW.remaining_s == pytest.approx(876_544 * 0.25)
    without = dataclasses.replace(VIEW, setting=SETTING)
    assert math.isnan(without.progress)
    assert math.isnan(without.remaining_s)
    assert "to go" not in shown(without)
    assert "of 1" not in shown(without)
    unreported = dataclasses.replace(VIEW, metrics={})
    assert math.isnan(unreported.progress)
    assert "of 1" not in shown(unreported)


def test_a_view_is_read_from_the_record_of_this_life() -> None:
    with runs.create("train", "", "one") as run:
        run.record_event("training", **SETTING, total_steps=10)
        run.log(1, {"train/step": 1, "train/loss": 2.0})
        run.flush()
        first = make_view(runs.load("one"), None, ["a note"])
        run.log(2, {"train/step": 2, "train/loss": math.nan})
        run.flush()
        second = make_view(runs.load("one"), first, [])
        run.record_event("stopped", reason="steps")
        run.log(3, {"train/step": 3, "train/loss": 1.0})
        run.flush()
        third = make_view(runs.load("one"), second, [])
    assert (first.phase, first.value("train/step"), first.history, first.notes) == ("training", 1, (2.0,), ("a note",))
    assert "a note" in shown(first)
    assert second.history == (2.0,)  # what is not finite is not drawn
    assert "not a number" in shown(second)
    assert (third.phase, third.history) == ("registering", (2.0, 1.0))
    with runs.reopen("one"):
        again = make_view(runs.load("one"), None, [])
    assert (again.phase, again.metrics, again.setting) == ("starting workers", {}, {})

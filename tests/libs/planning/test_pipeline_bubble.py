"""The predicted bubble: textbook values where there are some, and what must hold for all schedules."""

import pytest

from shoal.errors import PlanError
from shoal.libs.planning.predict.simulate_pipeline import TransferTime, plan_actions, simulate_step
from shoal.parallel.pipeline.schedules import SCHEDULE_CLASSES, SINGLE_STAGE, get_stage_ranks


@pytest.mark.parametrize("schedule", SINGLE_STAGE)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (2, 8), (4, 8), (3, 12)])
def test_one_stage_for_each_rank_idles_as_the_textbook_says(schedule: str, ranks: int, micro_batches: int) -> None:
    """(p - 1) / (m + p - 1), from 1811.06965 (GPipe); 1F1B saves memory, not time."""
    found = simulate_step(schedule, ranks, micro_batches, [1.0] * ranks, [2.0] * ranks)
    assert found.idle_share == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))
    assert found.step_s == pytest.approx(3.0 * (micro_batches + ranks - 1))


@pytest.mark.parametrize("ranks", [2, 4])
def test_two_stages_for_each_rank_halve_the_bubble(ranks: int) -> None:
    """(p - 1) / v of a micro-batch's time, from 2104.04473, section 2.2."""
    found = simulate_step("interleaved_1f1b", ranks, 2 * ranks, [1.0] * 2 * ranks, [2.0] * 2 * ranks)
    bubble = (ranks - 1) / 2
    assert found.idle_share == pytest.approx(bubble / (2 * ranks + bubble))


def test_what_is_handed_on_takes_its_time_both_ways() -> None:
    """GPipe, two micro-batches: F F then B B on each rank, the second behind the first, by hand."""
    found = simulate_step("gpipe", 2, 2, [1.0, 1.0], [2.0, 2.0], messages=[TransferTime(transit_s=0.25)])
    assert found.step_s == pytest.approx(1.0 + 0.25 + 2 * 1.0 + 2 * 2.0 + 0.25 + 2.0)
    ways = [TransferTime(transit_s=0.25), TransferTime(transit_s=0.5)]
    found = simulate_step("gpipe", 3, 1, [1.0] * 3, [2.0] * 3, messages=ways, between_s=0.125)
    assert found.step_s == pytest.approx(0.125 + 3 * 1.0 + 3 * 2.0 + 2 * (0.25 + 0.5) + 0.125)
    assert found.busy_s == [3.0] * 3


def test_who_sends_and_who_takes_in_computes_nothing_meanwhile() -> None:
    """GPipe, two micro-batches, by hand: each rank sends twice and takes in twice, some of it while others compute."""
    plain = simulate_step("gpipe", 2, 2, [1.0, 1.0], [2.0, 2.0])
    found = simulate_step(
        "gpipe", 2, 2, [1.0, 1.0], [2.0, 2.0], messages=[TransferTime(send_s=0.25, transit_s=0.125, take_s=0.5)]
    )
    # F, sent, under way | taken in, F, taken in, F, B, sent, under way | taken in, B, taken in, B
    assert found.step_s == pytest.approx(1.0 + 0.375 + 2 * 1.5 + 2.0 + 0.375 + 2 * 2.5)
    assert found.busy_s == plain.busy_s == [6.0, 6.0]


@pytest.mark.parametrize("schedule", SCHEDULE_CLASSES)
def test_every_schedule_computes_everything_once(schedule: str) -> None:
    works = [work for rank in plan_actions(schedule, 2, 4) for work in rank]
    stages = get_stage_ranks(schedule, 2)
    every = {(stage, index) for stage in range(len(stages)) for index in range(4)}
    kinds = {kind: [(work.stage, work.micro_batch) for work in works if work.kind == kind] for kind in "FBIW"}
    assert sorted(kinds["F"]) == sorted(every)
    assert sorted(kinds["B"] + kinds["I"]) == sorted(every)
    assert sorted(kinds["I"]) == sorted(kinds["W"])


@pytest.mark.parametrize("schedule", SCHEDULE_CLASSES)
def test_what_all_schedules_have_in_common(schedule: str) -> None:
    stages = len(get_stage_ranks(schedule, 2))
    plain = simulate_step(schedule, 2, 8, [1.0] * stages, [2.0] * stages)
    assert sum(plain.busy_s) == pytest.approx(8 * 3 * stages)
    assert 0 < plain.idle_share < 0.2
    slower = simulate_step(
        schedule, 2, 8, [1.0] * stages, [2.0] * stages, messages=[TransferTime(transit_s=0.5)] * (stages - 1)
    )
    busier = simulate_step(
        schedule, 2, 8, [1.0] * stages, [2.0] * stages, messages=[TransferTime(send_s=0.25, take_s=0.25)] * (stages - 1)
    )
    assert busier.step_s > plain.step_s
    assert busier.busy_s == pytest.approx(plain.busy_s)
    assert slower.step_s > plain.step_s
    halting = simulate_step(schedule, 2, 8, [1.0] * stages, [2.0] * stages, between_s=0.1)
    assert halting.step_s > plain.step_s
    assert slower.busy_s == halting.busy_s == pytest.approx(plain.busy_s)
    uneven = simulate_step(schedule, 2, 8, [1.0] * (stages - 1) + [4.0], [2.0] * (stages - 1) + [8.0])
    assert uneven.idle_share > plain.idle_share


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "remedy"),
    [("1f1b", 1, "use 2 or more"), ("dualpipev", 3, "use 4 or more"), ("interleaved_1f1b", 5, "use a multiple of 2")],
)
def test_schedules_that_cannot_be_made(schedule: str, micro_batches: int, remedy: str) -> None:
    with pytest.raises(PlanError, match=remedy):
        simulate_step(schedule, 2, micro_batches, [1.0] * 4, [1.0] * 4)

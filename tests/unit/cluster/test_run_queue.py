"""The order in which waiting runs start, and what a waiting run says."""

from dataclasses import replace

from shoal.cluster.run_queue import (
    AdmissionState,
    QueuedRun,
    describe_shortage,
    has_capacity,
    list_ahead,
    order_waiting,
)

GPUS = {"GPU": 4.0}


def make_run(name: str, since_s: float = 0.0, *, owner: str = "ann", priority: int = 0, gpus: float = 4.0) -> QueuedRun:
    return QueuedRun(name, "01000000", owner, priority, since_s, {"GPU": gpus})


def start(run: QueuedRun, state: AdmissionState = AdmissionState.RUNNING) -> QueuedRun:
    return replace(run, state=state)


def names(runs: list[QueuedRun]) -> list[str]:
    return [each.run_id for each in runs]


def test_a_higher_priority_starts_first_then_the_oldest() -> None:
    runs = [make_run("new", 3.0), make_run("old", 1.0), make_run("urgent", 9.0, priority=1)]
    assert names(order_waiting(runs)) == ["urgent", "old", "new"]
    assert names(order_waiting(runs[::-1])) == ["urgent", "old", "new"], "whoever looks finds the same order"


def test_the_owner_with_the_fewest_started_runs_is_first() -> None:
    bob = [make_run(f"bob-{number}", 10.0 + number, owner="bob") for number in range(2)]
    ann = [make_run(f"ann-{number}", number) for number in range(3)]
    assert names(order_waiting([*ann, *bob])) == ["ann-0", "bob-0", "ann-1", "bob-1", "ann-2"]
    assert names(order_waiting([start(make_run("ann-old")), *ann, *bob])) == [
        "bob-0",
        "ann-0",
        "bob-1",
        "ann-1",
        "ann-2",
    ]
    urgent = make_run("ann-urgent", 99.0, priority=5)
    assert names(order_waiting([start(make_run("ann-old")), *ann, *bob, urgent]))[0] == "ann-urgent"


def test_nothing_overtakes_a_run_that_needs_the_same() -> None:
    large, small = make_run("large", 1.0, gpus=8.0), make_run("small", 2.0, gpus=1.0)
    assert not has_capacity(small, [large, small], GPUS)
    assert has_capacity(small, [large, small], {"GPU": 9.0})
    on_cpus = replace(small, needs={"CPU": 2.0})
    assert has_capacity(on_cpus, [large, on_cpus], {"CPU": 2.0}), "it needs nothing that the first one needs"
    assert not has_capacity(on_cpus, [large, on_cpus], {"CPU": 1.0})


def test_the_places_of_a_run_that_starts_are_taken() -> None:
    starting, own = start(make_run("starting", 5.0), AdmissionState.STARTING), make_run("own", 1.0, priority=9)
    assert names(list_ahead(own, [starting, own])) == ["starting"]
    assert not has_capacity(own, [starting, own], GPUS)
    assert has_capacity(own, [start(starting), own], GPUS), "what a running one has is not free anyway"


def test_two_runs_that_take_the_same_places_see_each_other() -> None:
    one, two = (start(make_run(name), AdmissionState.STARTING) for name in ("one", "two"))
    assert not has_capacity(one, [one, two], GPUS)
    assert not has_capacity(two, [one, two], GPUS)
    assert has_capacity(one, [one], GPUS)


def test_a_waiting_run_says_what_is_free_who_has_the_rest_and_its_position() -> None:
    running = start(make_run("running", owner="bob@b"))
    first = make_run("first", 1.0)
    own = make_run("own", 2.0)
    total = {"GPU": 8.0, "CPU": 32.0}
    assert describe_shortage(own, [running, own], {"GPU": 1.0}, total) == (
        "1 of 8 GPUs free; running (bob@b) has 4 GPU; other work has 3 GPU"
    )
    assert describe_shortage(own, [running, own, first], GPUS, total) == (
        "4 of 8 GPUs free; running (bob@b) has 4 GPU; after first, 2 of 2 in the queue"
    )
    many = [start(make_run(f"r{number}", gpus=1.0)) for number in range(5)]
    assert "r2 (ann) has 1 GPU; 2 more runs have others" in describe_shortage(own, [*many, own], {"GPU": 3.0}, total)

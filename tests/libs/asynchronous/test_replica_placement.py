"""On which hosts the processes of a run of replicas begin, at first and after a loss."""

from __future__ import annotations

from collections import Counter

import pytest

from shoal.libs.asynchronous.process_group import Host, ReplicaPlacement

HERE, THERE, BEYOND = (Host(name, 2) for name in ("here", "there", "beyond"))


def place(placement: ReplicaPlacement, names: list[str], *hosts: Host) -> list[str]:
    return [placement.choose(name, hosts) for name in names]


def workers(number: int) -> list[str]:
    return [f"worker {index}" for index in range(number)]


def test_workers_are_spread_and_the_chief_is_at_home() -> None:
    assert place(ReplicaPlacement("here"), workers(2), THERE, HERE) == ["here", "there"]
    assert place(ReplicaPlacement("here"), workers(3), THERE, HERE, BEYOND) == ["here", "there", "beyond"]
    assert Counter(place(ReplicaPlacement("here"), workers(6), THERE, HERE, BEYOND)) == dict.fromkeys(
        ("here", "there", "beyond"), 2
    )


def test_a_large_host_has_more_workers_and_what_has_no_place_goes_anywhere() -> None:
    chosen = place(ReplicaPlacement("here"), workers(7), Host("here", 1), Host("large", 4))
    assert chosen == ["here", "large", "large", "large", "large", "", ""]


def test_the_first_server_is_at_home_and_others_are_spread() -> None:
    names = [f"server {index}" for index in range(3)]
    assert place(ReplicaPlacement("here"), names, THERE, HERE) == ["here", "there", "here"]


def test_a_home_without_a_place_has_neither_chief_nor_server() -> None:
    """As the head of many clusters, which has no CPUs."""
    chosen = place(ReplicaPlacement("here"), ["server 0", *workers(3)], Host("here", 0), THERE, BEYOND)
    assert chosen == ["there", "there", "beyond", "there"]


@pytest.mark.parametrize("lost", ["worker 1", "worker 2"])
def test_a_replacement_begins_where_there_is_room(lost: str) -> None:
    placement = ReplicaPlacement("here")
    place(placement, workers(3), HERE, THERE, BEYOND)
    left = [each for each in (HERE, THERE, BEYOND) if each.id != {"worker 1": "there", "worker 2": "beyond"}[lost]]
    other = "beyond" if lost == "worker 1" else "there"
    assert placement.choose(lost, left) == "here"
    assert placement.choose("worker 3", left) == other


def test_workers_that_share_memory_are_on_one_host_with_places_for_all() -> None:
    large = Host("large", 4)
    assert place(ReplicaPlacement("here", 2), workers(2), HERE, large) == ["here"] * 2
    placement = ReplicaPlacement("here", 4)
    assert place(placement, ["server 0", *workers(4)], HERE, large) == ["large"] * 5
    assert placement.choose("worker 1", [HERE, large, Host("larger", 8)]) == "large"
    assert place(placement, workers(4), HERE, Host("larger", 8)) == ["larger"] * 4

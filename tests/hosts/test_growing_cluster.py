"""Nodes come for what has no place, and go again: rehearsed by a program of its own, whose cluster ends with it."""

import re
import sys

import pytest

from shoal_program import ROOT, Program

SCRIPT = str(ROOT / "tests/rehearse.py")
TIMES = re.compile(r"^ *[\d.]+ s  ", re.MULTILINE)


def rehearse() -> str:
    with Program([sys.executable, SCRIPT]) as program:
        assert program.wait(1200) == 0, program.said
        return TIMES.sub("", program.said)


def assert_in_order(said: str, *lines: str) -> None:
    at = 0
    for line in lines:
        found = re.compile(line, re.MULTILINE).search(said, at)
        assert found, f"no {line!r} after {said[:at]!r} in {said[at:]!r}"
        at = found.end()


@pytest.mark.soak
def test_nodes_follow_the_load_and_go_when_they_are_idle() -> None:
    assert_in_order(
        rehearse(),
        r"refused at once: num_cpus = 2.0: .* its autoscaler may add no more than 3 small \(1 CPU\)",
        r"refused at once: workers = 4: .* its autoscaler may add no more than 3 small \(1 CPU\)",
        "the endpoint answers with 1 of 1 replicas",
        "16 clients ask",
        "`shoal status`: [12] more replicas? wanted, waiting for nodes",
        "3 replicas answer",
        "the clients rest",
        "1 replicas answer",
        "the endpoint is closed",
        "no node is left",
        "`shoal status`: 2 workers need a CPU each: .*; waiting for nodes: [12] small",
        "trained by 2 workers: 4 steps",
        "no node is left",
    )

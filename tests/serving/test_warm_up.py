"""What a warm-up asks for, and what it takes for the time of a forward, on a clock that nothing else moves."""

from __future__ import annotations

import pytest

from shoal.serve.model.warm_up import MAX_MEASURE_S, batch_sizes, time_warm_forwards


def test_warm_up_sizes_are_powers_of_two_and_the_largest_batch() -> None:
    assert [batch_sizes(size) for size in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


class Machine:
    """Forwards that take as long as they are told, on a clock that nothing else moves."""

    def __init__(self, *seconds: float) -> None:
        self.now_s, self._seconds = 0.0, list(seconds)
        self.sizes: list[int] = []

    def forward(self, size: int) -> None:
        self.sizes.append(size)
        self.now_s += self._seconds.pop(0)

    def measured(self, *sizes: int) -> list[tuple[int, float]]:
        return time_warm_forwards(self.forward, sizes, lambda: self.now_s)


def test_what_else_the_machine_does_is_not_measured() -> None:
    machine = Machine(0.01, 0.5, 0.3, 0.02)
    assert machine.measured(1, 2) == [(1, pytest.approx(0.01)), (2, pytest.approx(0.02))]
    assert machine.sizes == [1, 1, 2, 2]


def test_a_slow_model_is_measured_as_far_as_the_time_reaches() -> None:
    machine = Machine(0.4 * MAX_MEASURE_S, 0.4 * MAX_MEASURE_S, 5.0, 7.0)
    assert machine.measured(1, 2, 4) == [(1, pytest.approx(0.4 * MAX_MEASURE_S)), (2, pytest.approx(5.0))]
    assert machine.sizes == [1, 1, 2]

"""What episodes that were played say of those that were not."""

from __future__ import annotations

import pytest

from shoal.flows.evaluation import Evaluation


def _played(returns: list[float]) -> Evaluation:
    return Evaluation(returns, 0, {1}, 1.0)


def test_equal_returns_are_sure() -> None:
    assert _played([500.0] * 20).sure_return == 500.0
    assert _played([480.0]).sure_return == 480.0


def test_scattered_returns_are_less_sure_than_their_mean() -> None:
    played = _played([400.0, 500.0] * 8)
    assert played.mean_return == 450.0
    assert played.sure_return == pytest.approx(450.0 - 2.0 * 51.64 / 4.0, abs=0.01)

"""The exact NashConv of Kuhn poker, by which self-play is measured, against what is known of the game."""

from itertools import product

import pytest
from benchmarks.ours.kuhn_poker import TURNS, Strategy, average, nash_conv

UNIFORM: Strategy = {(card, history): (0.5, 0.5) for card in range(3) for history in TURNS}


def equilibrium(alpha: float) -> dict[tuple[int, str], tuple[float, float]]:
    """Of Kuhn's family, 0 ≤ alpha ≤ 1/3; probabilities of a bet."""
    bets = {
        **{(0, ""): alpha, (1, ""): 0.0, (2, ""): 3 * alpha},
        **{(0, "pb"): 0.0, (1, "pb"): alpha + 1 / 3, (2, "pb"): 1.0},
        **{(0, "p"): 1 / 3, (1, "p"): 0.0, (2, "p"): 1.0},
        **{(0, "b"): 0.0, (1, "b"): 1 / 3, (2, "b"): 1.0},
    }
    return {point: (1 - bet, bet) for point, bet in bets.items()}


@pytest.mark.parametrize("alpha", [0.0, 0.2, 1 / 3])
def test_the_equilibria_have_none(alpha: float) -> None:
    assert nash_conv(equilibrium(alpha)) == pytest.approx(0.0, abs=1e-12)


def test_uniform_play_has_eleven_twelfths() -> None:
    assert nash_conv(UNIFORM) == pytest.approx(11 / 12)
    never_calls = equilibrium(0.2) | {(1, "b"): (1.0, 0.0)}
    assert nash_conv(never_calls) > 0.05


def test_the_average_is_the_mixture_of_whole_games() -> None:
    """A bettor and a checker that then calls: in the second round only the checker's strategy counts."""
    bettor = dict.fromkeys(UNIFORM, (0.0, 1.0))
    checker = {point: (1.0, 0.0) if point[1] == "" else (0.0, 1.0) for point in UNIFORM}
    folder = dict.fromkeys(UNIFORM, (1.0, 0.0))
    mixed = average([bettor, checker, folder])
    for card, history in product(range(3), TURNS):
        share = {"": 1 / 3, "pb": 1 / 2}.get(history, 2 / 3)
        assert mixed[card, history][1] == pytest.approx(share)
    assert nash_conv(average([equilibrium(0.1)] * 3)) == pytest.approx(0.0, abs=1e-12)

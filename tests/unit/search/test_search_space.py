"""Search spaces: words and objects, draws, positions, perturbation, and what is refused."""

import math

import numpy as np
import pytest

from shoal.errors import ConfigError
from shoal.search.space import Interval, Options, SearchSpace

WORDS: dict[str, object] = {
    "optimizer.learning_rate": "log(1e-4, 1e-1)",
    "augmentation.noise": "uniform(0,0.3)",
    "augmentation.shift": "int(0,4)",
    "model.width": "logint(8,256)",
    "optimizer.name": "choice(adam, sgd)",
    "model.layers": "choice([64], [64, 32])",
    "batch": "choice(16,32,64)",
}


@pytest.fixture
def space() -> SearchSpace:
    return SearchSpace.parse(WORDS)


def test_words_objects_and_lists_mean_the_same(space: SearchSpace) -> None:
    objects = {
        "optimizer.learning_rate": Interval(1e-4, 1e-1, is_log=True),
        "augmentation.noise": Interval(0, 0.3),
        "augmentation.shift": Interval(0, 4, is_integer=True),
        "model.width": Interval(8, 256, is_log=True, is_integer=True),
        "optimizer.name": ["adam", "sgd"],
        "model.layers": Options(([64], [64, 32])),
        "batch": (16, 32, 64),
    }
    assert dict(SearchSpace.parse(objects)) == dict(space)
    assert dict(SearchSpace.from_overrides([f"{path}={word}" for path, word in WORDS.items()])) == dict(space)


def test_words_are_read_back(space: SearchSpace) -> None:
    assert dict(SearchSpace.parse(space.describe())) == dict(space)


def test_draws_stay_within_and_fill_the_space(space: SearchSpace) -> None:
    rng = np.random.default_rng(0)
    draws = [space.sample(rng) for _ in range(4000)]
    rates = np.log([draw["optimizer.learning_rate"] for draw in draws])
    assert np.quantile(rates, 0.5) == pytest.approx(math.log(math.sqrt(1e-5)), abs=0.3)  # of 6.9; standard error 0.05
    counts = np.bincount([draw["augmentation.shift"] for draw in draws])
    assert len(counts) == 5
    assert counts.min() > 650  # expected 800, standard deviation 25
    widths = [draw["model.width"] for draw in draws]
    assert min(widths) >= 8
    assert max(widths) <= 256
    assert all(type(width) is int for width in widths)
    assert sum(width < 45 for width in widths) == pytest.approx(2000, abs=150)  # 45 is the geometric mean
    assert {draw["optimizer.name"] for draw in draws} == {"adam", "sgd"}


def test_positions_and_values_are_inverse(space: SearchSpace) -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        values = space.sample(rng)
        again = space.from_unit(space.to_unit(values))
        assert again == {
            path: pytest.approx(value) if type(value) is float else value for path, value in values.items()
        }
    assert space.to_unit(space.from_unit([0.0] * len(space))).max() <= 0.5
    assert [space["optimizer.learning_rate"].from_unit(end) for end in (0.0, 1.0)] == [0.0001, 0.1]


def test_perturbation_multiplies_and_clips() -> None:
    rate = Interval(1e-4, 1e-1, is_log=True)
    rng = np.random.default_rng(0)
    assert {rate.perturb(0.01, rng, (0.8, 1.2)) for _ in range(50)} == {0.01 * 0.8, 0.01 * 1.2}
    assert {rate.perturb(0.09, rng, (0.8, 1.2)) for _ in range(50)} == {0.09 * 0.8, 0.1}


def test_perturbation_leaves_zero_and_small_integers() -> None:
    rng = np.random.default_rng(0)
    moved = [Interval(0, 0.5).perturb(0.0, rng, (0.8, 1.2)) for _ in range(50)]
    assert sorted(set(moved)) == [0.0, pytest.approx(0.01)]  # a fifth of a tenth of the width
    assert {Interval(0, 4, is_integer=True).perturb(2, rng, (0.8, 1.2)) for _ in range(50)} == {1, 3}
    assert {Interval(1, 8, is_log=True, is_integer=True).perturb(1, rng, (0.8, 1.2)) for _ in range(50)} == {1, 2}


def test_perturbation_of_choices_moves_numbers_to_a_neighbour_and_leaves_texts() -> None:
    rng = np.random.default_rng(0)
    assert {Options((64, 16, 32)).perturb(32, rng, (0.8, 1.2)) for _ in range(50)} == {16, 64}
    assert {Options((64, 16, 32)).perturb(64, rng, (0.8, 1.2)) for _ in range(50)} == {32, 64}
    assert {Options(("adam", "sgd")).perturb("sgd", rng, (0.8, 1.2)) for _ in range(50)} == {"sgd"}


def test_resampling_draws_each_with_the_probability(space: SearchSpace) -> None:
    rng = np.random.default_rng(0)
    values = space.sample(rng)
    assert space.resample(values, rng, 0.0) == values
    changed = [
        space.resample(values, rng, 0.25)["optimizer.learning_rate"] != values["optimizer.learning_rate"]
        for _ in range(2000)
    ]
    assert sum(changed) == pytest.approx(500, abs=80)  # standard deviation 19


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("uniform(1,1)", "not below"),
        ("uniform(0.3,0)", "smaller number first"),
        ("log(0,1)", "no logarithm"),
        ("log(-1,1)", "no logarithm"),
        ("logint(0,8)", "use int"),
        ("int(0.5,2)", "not an integer"),
        ("uniform(0,.inf)", "finite"),
        ("uniform(a,b)", "finite"),
        ("uniform(true,2)", "finite"),
        ("uniform(1)", "1 numbers"),
        ("choice()", "no option"),
        ("choice(adam)", "one option"),
        ("choice(adam,adam)", "twice"),
        ("normal(0,1)", "uniform(low,high)"),
        ("0.1", "no distribution"),
        (0.1, "no distribution"),
        ("choice([1)", "cannot be read"),
    ],
)
def test_impossible_distributions_are_refused_with_what_fits(word: object, part: str) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate") as caught:
        SearchSpace.parse({"optimizer.learning_rate": word})
    assert part in str(caught.value)


@pytest.mark.parametrize("overrides", [[], ["rate"], ["=log(1,2)"], ["a..b=log(1,2)"], ["a=log(1,2)", "a=log(1,3)"]])
def test_impossible_spaces_are_refused(overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match="space"):
        SearchSpace.from_overrides(overrides)

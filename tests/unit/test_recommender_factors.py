"""The factors of the film site: fold-in against oracles, what is learnt, versions on disk, and files with gaps."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from python_program import run_python
from shoal.errors import DataError

SITE = Path(__file__).parents[2] / "serve_apps" / "recommender"
sys.path.append(str(SITE))

from films.factorisation import (  # noqa: E402
    ItemPosterior,
    Ratings,
    extend,
    find_best,
    fit,
    fold_in,
    predict,
    refit_users,
    score,
    unpack,
)
from films.movielens import generate, read_folder  # noqa: E402
from films.versions import CurrentVersion, RatingLog, open_version, read_log, write_version  # noqa: E402


@pytest.fixture(scope="module")
def ratings() -> Ratings:
    table = generate(num_users=120, num_films=150, num_ratings=5000)
    return Ratings(table.user, table.film, table.rating, 121, 150)


@pytest.fixture(scope="module")
def items(ratings: Ratings) -> ItemPosterior:
    return fit(ratings, num_factors=4, num_sweeps=5)[0]


def fold_in_by_loops(items: ItemPosterior, rated: list[int], stars: list[float]) -> np.ndarray:
    """The normal equations of Lim and Teh, entry by entry, with the bias as the last factor."""
    size = items.vectors.shape[1]
    left, right = np.diag(items.user_precisions), np.zeros(size)
    for film, rating in zip(rated, stars, strict=True):
        covariance = unpack(items.covariances[film], size)
        x = [*items.vectors[film, :-1], 1.0]
        for row in range(size):
            is_factor = row < size - 1
            shared = covariance[row, -1] if is_factor else 0.0  # of a factor and the film's own bias
            right[row] += (x[row] * (rating - items.mean - items.vectors[film, -1]) - shared) / items.noise
            for column in range(size):
                both = is_factor and column < size - 1
                left[row, column] += (x[row] * x[column] + (covariance[row, column] if both else 0.0)) / items.noise
    return np.linalg.lstsq(left, right, rcond=None)[0]


def test_fold_in_is_the_normal_equations_of_the_full_history(items: ItemPosterior) -> None:
    random = np.random.default_rng(1)
    for length in (0, 1, 2, 40):
        rated = random.choice(150, length, replace=False)
        stars = random.integers(1, 6, length).astype(float)
        expected = fold_in_by_loops(items, rated.tolist(), stars.tolist())
        np.testing.assert_allclose(fold_in(items, rated, stars), expected, atol=1e-9)


def test_fold_in_is_a_full_refit_with_fixed_items(ratings: Ratings, items: ItemPosterior) -> None:
    users = refit_users(ratings, items)
    for user in range(ratings.num_users):
        is_own = ratings.user == user
        alone = fold_in(items, ratings.item[is_own], ratings.rating[is_own])
        np.testing.assert_allclose(alone, users[user], rtol=0, atol=1e-6)


def test_factors_predict_unseen_ratings_better_than_biases() -> None:
    table = generate(num_users=300, num_films=200, num_ratings=15_000)
    is_held_back = np.random.default_rng(0).random(len(table.rating)) < 0.2
    train, test = ~is_held_back, is_held_back
    known = Ratings(table.user[train], table.film[train], table.rating[train], 301, 200)
    errors = []
    for num_factors in (0, 8):
        items, users = fit(known, num_factors, num_sweeps=8)
        predicted = predict(items, users, table.user[test], table.film[test])
        errors.append(float(np.sqrt(np.square(predicted - table.rating[test]).mean())))
    assert errors[1] < 0.97 * errors[0]


def test_the_best_are_unrated_and_in_order(items: ItemPosterior) -> None:
    rated = np.arange(0, 150, 2)
    user = fold_in(items, rated, np.full(len(rated), 4.0))
    best, expected = find_best(items, user, rated, 200)
    assert sorted(best) == list(range(1, 150, 2))
    assert (np.diff(expected) <= 0).all()
    np.testing.assert_allclose(expected, score(items, user)[best].clip(0.5, 5.0))
    assert len(find_best(items, user, np.arange(150), 200)[0]) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda items: fold_in(items, np.array([2, 150]), np.full(2, 4.0)), "rated = 150: is no position below 150"),
        (lambda items: fold_in(items, np.array([-1]), np.full(1, 4.0)), "rated = -1.*from 0"),
        (lambda items: fold_in(items, np.array([0.0]), np.full(1, 4.0)), "rated = 0.0: is no position.*whole numbers"),
        (lambda items: fold_in(items, np.array([1]), np.full(1, np.nan)), "rating = nan: is no rating"),
        (lambda items: find_best(items, np.zeros(4), np.array([-1]), 5), "rated = -1"),
        (lambda _: Ratings(np.array([2]), np.array([0]), np.ones(1), 2, 3), "user = 2: is no position below 2"),
        (lambda _: Ratings(np.array([1]), np.array([-1]), np.ones(1), 2, 3), "item = -1: is no position below 3"),
        (lambda _: Ratings(np.array([1]), np.array([1]), np.array([np.inf]), 2, 3), "rating = inf"),
        (lambda _: fit(Ratings(*[np.zeros(0, int)] * 2, np.zeros(0), 2, 3), 2, 2), "ratings = 0: there is none"),
    ],
)
def test_ids_and_ratings_that_are_none_are_rejected_by_name(
    call: Callable[[ItemPosterior], object], message: str, items: ItemPosterior
) -> None:
    with pytest.raises(DataError, match=message):
        call(items)


def test_a_viewer_of_unrated_films_alone_has_the_prior(items: ItemPosterior) -> None:
    """Films that are newer than the version have no factors, and films without ratings have those of the prior."""
    user = fold_in(items, np.zeros(0, int), np.zeros(0))
    assert not user.any()
    longer = extend(items, 153)
    folded = fold_in(longer, np.array([150, 151]), np.array([5.0, 5.0]))
    assert np.isfinite(find_best(longer, folded, np.array([150, 151]), 200)[1]).all()
    few, _ = fit(Ratings(np.array([0]), np.array([1]), np.array([4.0]), 1, 5), 2, 4)  # of five films one is rated
    assert np.isfinite(score(few, fold_in(few, np.array([3]), np.array([5.0])))).all()


def test_a_film_that_is_new_is_expected_at_the_viewers_mean(items: ItemPosterior) -> None:
    longer = extend(items, 153)
    user = fold_in(longer, np.array([1, 2]), np.array([5.0, 4.0]))
    np.testing.assert_allclose(score(longer, user)[150:], longer.mean + user[-1])
    np.testing.assert_allclose(score(longer, user)[:150], score(items, user))


# -- versions on disk


def as_log(rows: list[tuple[int, int, float, int]]) -> tuple[np.ndarray, ...]:
    table = np.array(rows, float).reshape(-1, 4)
    return table[:, 0].astype(int), table[:, 1].astype(int), table[:, 2], table[:, 3].astype(int)


def test_a_row_is_learnt_once_however_often_it_is_read() -> None:
    first = as_log([(1, 0, 3.0, 1), (2, 0, 4.0, 2), (1, 5, 2.0, 3)])
    again = as_log([(1, 5, 2.0, 3), (1, 0, 5.0, 4)])  # row 3 again, and a film rated anew
    log = RatingLog.empty().merge(*first).merge(*again)
    repeated = log.merge(*again).merge(*first)
    for each in (log, repeated):
        assert list(zip(each.user, each.film, each.rating, each.row, strict=True)) == [
            (1, 0, 5.0, 4), (1, 5, 2.0, 3), (2, 0, 4.0, 2),
        ]  # fmt: skip
        assert each.last_row == 4


def test_a_version_is_what_was_written_and_three_are_retained(items: ItemPosterior, tmp_path: Path) -> None:
    current = CurrentVersion(tmp_path)
    with pytest.raises(DataError, match="there is no version of the factors yet"):
        current.get()
    log = RatingLog.empty().merge(*as_log([(1, 0, 3.0, 7)]))
    assert [write_version(tmp_path, items, log) for _ in range(5)] == [1, 2, 3, 4, 5]
    assert sorted(path.name for path in tmp_path.glob("v*")) == ["v00000003", "v00000004", "v00000005"]
    version = current.get()
    assert (version.number, version.last_row, version.num_ratings) == (5, 7, 1)
    assert isinstance(version.items.vectors, np.memmap)
    np.testing.assert_array_equal(version.items.covariances, items.covariances)
    assert read_log(tmp_path, 5).row.tolist() == [7]
    (tmp_path / "v00000005" / "vectors.npy").write_bytes(b"")
    with pytest.raises(DataError, match=r"v00000005.*is damaged"):
        open_version(tmp_path, 5)


KILLED_AT_EACH_SYNC = """
import os, signal, sys
from dataclasses import replace
from pathlib import Path
import numpy as np
from films.factorisation import start
from films.versions import CurrentVersion, RatingLog, read_log, write_version

folder, count = Path(sys.argv[1]), 0
items, log = start(40, 3, 3.5), RatingLog.empty()
write_version(folder, items, log)
sync, reader = os.fsync, CurrentVersion(folder)
for moment in range(1, 100):
    before = reader.get().number
    child = os.fork()
    if child == 0:
        calls = 0
        def fsync(descriptor):
            global calls
            calls += 1
            sync(descriptor)
            if calls == moment:
                os.kill(os.getpid(), signal.SIGKILL)
        os.fsync = fsync
        write_version(folder, replace(items, mean=float(moment)), replace(log, last_row=moment))
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    version = reader.get()
    assert version.number >= before
    assert version.last_row == read_log(folder, version.number).last_row
    if version.number != before:
        assert version.items.mean == version.last_row == moment
    if status == 0:
        print(moment, version.number != before)
        break
"""


def test_a_process_killed_at_any_moment_of_writing_leaves_a_full_version(tmp_path: Path) -> None:
    moments, is_written = run_python(KILLED_AT_EACH_SYNC, str(tmp_path / "models"), cwd=SITE).split()
    assert int(moments) > 10  # eight arrays, the facts, folders and CURRENT, each killed at once
    assert is_written == "True"


# -- files


def write_csv(folder: Path, ratings: str, movies: str = '1,Heat,Crime|Drama\n2,"Heat, Again",\n') -> Path:
    (folder / "movies.csv").write_text("movieId,title,genres\n" + movies)
    (folder / "ratings.csv").write_text(ratings)
    return folder


HEADER = "userId,movieId,rating,timestamp\n"


def test_a_folder_in_movielens_format_is_read_in_the_order_of_time(tmp_path: Path) -> None:
    table = read_folder(write_csv(tmp_path, HEADER + "7,2,4.5,20\n7,1,3,10\n"))
    assert [(film.movie_id, film.title, film.genres) for film in table.films] == [
        (1, "Heat", "Crime|Drama"), (2, "Heat, Again", ""),
    ]  # fmt: skip
    assert (table.user.tolist(), table.film.tolist(), table.rating.tolist()) == ([7, 7], [0, 1], [3.0, 4.5])


@pytest.mark.parametrize("blank", ["\n", "\n\n", "  \n", "\r\n"])
def test_blank_lines_are_no_rows(blank: str, tmp_path: Path) -> None:
    folder = write_csv(tmp_path, HEADER + "7,2,4.5,20\n" + blank, "1,Heat,Crime\n" + blank + "2,Ran,\n" + blank)
    table = read_folder(folder)
    assert (len(table.films), table.rating.tolist()) == (2, [4.5])
    (folder / "ratings.csv").write_text(HEADER + "7,2,4.5,20\n" + blank + "7,2,9,20\n")
    with pytest.raises(DataError, match=rf"row {3 + blank.count(chr(10))} = '9'"):
        read_folder(folder)


def test_recboles_files_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "x.item").write_text(
        "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n5\tA \"B\tx\t1995\tDrama War\n"
        .replace("\tx", "")
    )  # fmt: skip
    (tmp_path / "x.inter").write_text(
        "user_id:token\titem_id:token\trating:float\ttimestamp:float\n3\t5\t4\t881250949\n\n"
    )
    table = read_folder(tmp_path)
    assert (table.films[0].title, table.films[0].genres, table.rating.tolist()) == ('A "B', "Drama|War", [4.0])


@pytest.mark.parametrize(
    ("ratings", "movies", "message"),
    [
        (HEADER + "1,1,4,10\n1,,4,10\n", None, r"ratings.csv, row 3 = '1,,4,10': movieId is empty"),
        (HEADER + "1,1,4\n", None, r"ratings.csv, row 2 = '1,1,4': has 3 fields instead of 4"),
        (HEADER + "1,1,much,10\n", None, r"ratings.csv, row 2 = 'much': rating is not between 0.5 and 5"),
        (HEADER + "1,1,4,10\n1,99,4,10\n", None, r"ratings.csv, row 3 = '99': no film has this number"),
        (HEADER + "x,1,4,10\n", None, r"row 2 = 'x': userId is no whole number"),
        (HEADER, None, r"ratings.csv, row 2 = '': there is no row behind the header"),
        ("user,movieId,rating\n1,1,4\n", None, r"ratings.csv, row 1 = 'user,movieId,rating': has no column userId"),
        (HEADER + "1,1,4,10\n", "1,Heat,\n1,Heat,\n", r"movies.csv, row 3 = '1': movieId is there twice"),
        (HEADER + "1,1,4,10\n", "1,,Drama\n", r"movies.csv, row 2 = '1,,Drama': title is empty"),
    ],
)
def test_a_gap_is_named_by_file_and_row(ratings: str, movies: str | None, message: str, tmp_path: Path) -> None:
    folder = write_csv(tmp_path, ratings, *filter(None, [movies]))
    with pytest.raises(DataError, match=message):
        read_folder(folder)

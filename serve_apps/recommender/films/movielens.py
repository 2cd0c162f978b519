"""Films and ratings: from a user's files, or generated.

    read_folder("my-folder")    # ratings.csv: userId,movieId,rating,timestamp; movies.csv: movieId,title,genres
    generate(seed=0)            # films and raters with hidden tastes, for a first look

A folder with `NAME.inter` and `NAME.item` (RecBole's files, as ml-100k comes with it) is read too. Every error is a
DataError that names file and row. Called by the command `load`, the recipe of the towers and the benchmark.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from films.factorisation import MAX_STARS, MIN_STARS, Floats, Ints
from shoal.errors import DataError

RATINGS, MOVIES = ("userId", "movieId", "rating", "timestamp"), ("movieId", "title", "genres")
ATOMIC_RATINGS, ATOMIC_MOVIES = ("user_id", "item_id", "rating", "timestamp"), ("item_id", "movie_title", "class")


@dataclass(frozen=True)
class Film:
    """A row of movies.csv. `movie_id` is the file's; genres are separated by |."""

    movie_id: int
    title: str
    genres: str


@dataclass(frozen=True)
class RatingTable:
    """Films, and N ratings in the order of their time: `user` is the file's id, `film` a position in `films`."""

    films: list[Film]
    user: Ints
    film: Ints
    rating: Floats
    timestamp: Ints


def read_folder(folder: str | Path) -> RatingTable:
    """Read a folder in MovieLens' format. Raises DataError."""
    folder = Path(folder)
    atomic = sorted(folder.glob("*.inter")) if folder.is_dir() else []
    if atomic:
        films = _read_films(atomic[0].with_suffix(".item"), ATOMIC_MOVIES, "\t", " ")
        return _read_ratings(atomic[0], ATOMIC_RATINGS, "\t", films)
    return _read_ratings(folder / "ratings.csv", RATINGS, ",", _read_films(folder / "movies.csv", MOVIES, ",", "|"))


def _read_films(path: Path, columns: tuple[str, ...], delimiter: str, separator: str) -> list[Film]:
    films: dict[int, Film] = {}
    for row, (movie, title, genres) in _read_rows(path, columns, delimiter, may_be_empty=columns[2]):
        number = _parse_integer(path, row, columns[0], movie)
        if number in films:
            raise DataError(_name(path, row), movie, f"{columns[0]} is there twice", "give each film one row")
        films[number] = Film(number, title, genres.replace(separator, "|"))
    return list(films.values())


def _read_ratings(path: Path, columns: tuple[str, ...], delimiter: str, films: list[Film]) -> RatingTable:
    position = {film.movie_id: at for at, film in enumerate(films)}
    users, items, ratings, times = list[int](), list[int](), list[float](), list[int]()
    for row, (user, movie, rating, timestamp) in _read_rows(path, columns, delimiter):
        number = _parse_integer(path, row, columns[1], movie)
        if number not in position:
            raise DataError(_name(path, row), movie, "no film has this number", "add it to the films, or drop the row")
        users.append(_parse_integer(path, row, columns[0], user))
        items.append(position[number])
        ratings.append(_parse_rating(path, row, columns[2], rating))
        times.append(_parse_integer(path, row, columns[3], timestamp))
    order = np.argsort(np.array(times, np.int64), kind="stable")
    table = RatingTable(
        films, np.array(users, np.int64), np.array(items, np.int64), np.array(ratings), np.array(times, np.int64)
    )
    return RatingTable(films, table.user[order], table.film[order], table.rating[order], table.timestamp[order])


def _read_rows(
    path: Path, columns: tuple[str, ...], delimiter: str, may_be_empty: str = ""
) -> Iterator[tuple[int, list[str]]]:
    """Number (the header is 1) and fields of each row that is not blank. RecBole's headers add a type to names."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            quoting = csv.QUOTE_MINIMAL if delimiter == "," else csv.QUOTE_NONE
            rows = csv.reader(file, delimiter=delimiter, quoting=quoting, strict=True)
            header = [name.partition(":")[0] for name in next(rows, [])]
            if missing := [name for name in columns if name not in header]:
                remedy = f"its first row must name {', '.join(columns)}"
                raise DataError(_name(path, 1), delimiter.join(header), f"has no column {missing[0]}", remedy)
            wanted = [header.index(name) for name in columns]
            row = 1
            for fields in rows:
                if not "".join(fields).strip() and len(fields) < 2:  # a blank line, often the last one
                    continue
                row = rows.line_num
                if len(fields) != len(header):
                    problem = f"has {len(fields)} fields instead of {len(header)}"
                    raise DataError(_name(path, row), delimiter.join(fields), problem, "fill or drop the row")
                for at, name in zip(wanted, columns, strict=True):
                    if not fields[at].strip() and name != may_be_empty:
                        problem = f"{name} is empty"
                        raise DataError(_name(path, row), delimiter.join(fields), problem, "fill or drop the row")
                yield row, [fields[at] for at in wanted]
            if row == 1:
                raise DataError(_name(path, 2), "", "there is no row behind the header", "give at least one")
    except (OSError, UnicodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError("data", str(path), f"cannot be read: {reason}", "give a readable UTF-8 file") from error


def _parse_integer(path: Path, row: int, column: str, text: str) -> int:
    try:
        value = float(text)  # RecBole and pandas write whole numbers as floats
    except ValueError:
        value = math.nan
    if not (value.is_integer() and abs(value) < 2**53):
        raise DataError(_name(path, row), text, f"{column} is no whole number", "write digits alone")
    return int(value)


def _parse_rating(path: Path, row: int, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not MIN_STARS <= value <= MAX_STARS:
        problem = f"{column} is not between {MIN_STARS} and {MAX_STARS:g}"
        raise DataError(_name(path, row), text, problem, "rescale it to MovieLens' stars")
    return value


def _name(path: Path, row: int) -> str:
    return f"{path}, row {row}"


GENRES = ("Comedy", "Drama", "Thriller", "Romance", "Adventure", "Documentary", "Fantasy", "Crime")
FIRST_WORDS = ("Quiet", "Last", "Broken", "Golden", "Hidden", "Endless", "Northern", "Paper", "Second", "Silver")
SECOND_WORDS = ("Harbour", "Winter", "Garden", "Signal", "Promise", "Orchard", "Letter", "Mountain", "Mirror", "Train")


def generate(num_users: int = 600, num_films: int = 800, num_ratings: int = 40_000, seed: int = 0) -> RatingTable:
    """Films and raters with hidden tastes: two genres a film, a liking of each genre a rater, both with biases.

    Popularity falls as a power of a film's rank, and activity by a log-normal, as in MovieLens. Ratings are whole stars
    with noise of .8 around mean 3.6; each rater rates a film at most once.
    """
    random = np.random.default_rng(seed)
    tastes = random.normal(0.0, 0.6, (num_users, len(GENRES)))
    kinds = np.array([random.choice(len(GENRES), 2, replace=False) for _ in range(num_films)])
    quality, mood = random.normal(0.0, 0.5, num_films), random.normal(0.0, 0.4, num_users)
    popularity = random.permutation(1.0 / np.arange(5, num_films + 5) ** 0.9)
    activity = random.lognormal(0.0, 1.0, num_users)
    share = np.minimum(activity / activity.sum() * num_ratings, num_films * 0.6)
    counts = np.maximum(share, 5).astype(np.int64)
    users = np.repeat(np.arange(num_users), counts)
    films = np.concatenate(
        [random.choice(num_films, count, replace=False, p=popularity / popularity.sum()) for count in counts]
    )
    liking = 3.6 + mood[users] + quality[films] + tastes[users[:, None], kinds[films]].sum(1)
    ratings = np.clip(np.rint(liking + random.normal(0.0, 0.8, len(users))), 1, 5)
    order = random.permutation(len(users))
    numbers = np.arange(1, num_films + 1)
    named = [
        Film(
            int(number),
            f"The {FIRST_WORDS[number % 10]} {SECOND_WORDS[number // 10 % 10]} {1 + number // 100}",
            "|".join(GENRES[kind] for kind in sorted(kinds[number - 1])),
        )
        for number in numbers
    ]
    times = 1_600_000_000 + 60 * np.arange(len(users))
    return RatingTable(named, users[order] + 1, films[order], ratings[order], times)

"""Two towers order films by what someone has rated: the second stage of serve_apps/recommender.

    shoal run recommender                                  # generated films and raters
    shoal run recommender args.folder=my-folder            # ratings.csv and movies.csv, in MovieLens' format
    shoal run recommender args.database=~/.shoal/recommender/ratings.sqlite   # what the site has learnt from
    shoal run recommender parallel=ddp workers=2
    python -m shoal.train task=recommender                 # in this process, without Ray
    shoal serve deploy movies                              # its endpoint; then make recommender endpoint=URL

The user tower sees a history (films and stars), the item tower a film; a score is the product of both vectors and the
film's bias. It learns to find the film that someone liked next (four stars or more) among others. It is judged as the
site uses it: factors of the earlier ratings choose 200 films for each viewer, and `hit_rate` is the share of viewers
whose last liked film is among the first ten of the towers' order. In the record with it, over the same candidates:
`hit_rate_factors`, the first stage's order, `hit_rate_popular`, and `found_rate`, the share that the 200 have at all.
An endpoint takes film ids of the site: positions from 1; 0 pads.
"""

import sqlite3
import sys
from collections.abc import Mapping
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from shoal.data import Data
from shoal.errors import ConfigError, DataError
from shoal.recipes import find_packaged
from shoal.registry import Signature, TensorSignature
from shoal.train import Task, TrainSpec

MIN_STARS, MAX_STARS = 0.5, 5.0  # as on the site
LIKED, NUM_CANDIDATES, NUM_FIRST = 4.0, 200, 10
NEUTRAL = 3.0  # stars that say neither


class TwoTower(nn.Module):
    """Scores of candidates [B, C] for histories [B, H] and their stars [B, H]. Film ids from 1; 0, and ids above
    `num_films`, have the embedding of the unknown film, which is zero and learns nothing."""

    def __init__(self, num_films: int, width: int, dropout: float, use_stars: bool) -> None:
        super().__init__()
        self.num_films, self.use_stars = num_films, use_stars
        self.films = nn.Embedding(num_films + 1, width, padding_idx=0)
        self.biases = nn.Embedding(num_films + 1, 1, padding_idx=0)
        nn.init.normal_(self.films.weight, std=0.1)
        nn.init.zeros_(self.biases.weight)
        with torch.no_grad():
            self.films.weight[0] = 0.0
        self.user = nn.Sequential(
            nn.Linear(2 * width, 2 * width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(2 * width, width)
        )
        self.item = nn.Linear(width, width)

    def forward(self, history: Tensor, ratings: Tensor, candidates: Tensor) -> Tensor:
        history, candidates = self._know(history), self._know(candidates)
        is_film = (history > 0).float()  # [B, H]
        seen = self.films(history)  # [B, H, W]
        count = is_film.sum(1, keepdim=True).clamp(min=1.0)
        liking = (ratings - NEUTRAL) * is_film if self.use_stars else is_film
        user = torch.cat([seen.sum(1) / count, (seen * liking.unsqueeze(-1)).sum(1) / count], dim=1)
        scores: Tensor = torch.einsum("bw,bcw->bc", self.user(user), self.item(self.films(candidates)))
        return scores + self.biases(candidates).squeeze(-1)

    def _know(self, films: Tensor) -> Tensor:
        return torch.where((films > 0) & (films <= self.num_films), films, 0)


class RecommenderTask(Task):
    """The next film that someone likes.

    folder:      a folder in MovieLens' format; "": generated films
    database:    the site's database instead
    max_history: the newest ratings that the user tower sees
    negatives:   other films, at random, among which the liked one is to be found
    num_films:   rows of the towers' table; films above it are unknown to them. Fixed, so that an endpoint builds the
                 same network without the ratings, and while films are added
    num_ratings: of the generated ones
    """

    parts: ClassVar = {
        "stars": {"use_stars": False},
        "dropout": {"dropout": 0.0},
        "long history": {"max_history": 5},
    }

    def __init__(
        self,
        *,
        folder: str = "",
        database: str = "",
        width: int = 32,
        dropout: float = 0.2,
        use_stars: bool = True,
        max_history: int = 50,
        negatives: int = 63,
        num_films: int = 2000,
        num_ratings: int = 40_000,
    ) -> None:
        if folder and database:
            raise ConfigError("args.database", database, "there is a folder too", "give one of them")
        self.folder, self.database, self.num_ratings = folder, database, num_ratings
        self.width, self.dropout, self.use_stars = width, dropout, use_stars
        self.max_history, self.negatives, self.num_films = max_history, negatives, num_films

    def model(self) -> nn.Module:
        return TwoTower(self.num_films, self.width, self.dropout, self.use_stars)

    def data(self) -> Data:
        num_films, user, film, stars = read_ratings(self.folder, self.database, self.num_ratings)
        if num_films > self.num_films:
            raise ConfigError("args.num_films", self.num_films, f"there are {num_films} films", "give as many or more")
        train, validation = split_last_liked(user, film, stars)
        log = (user[train], film[train], stars[train])
        liked = Liked(self.max_history, self.negatives, num_films, log)
        if not len(validation) or not len(liked):
            problem = f"its {len(user)} ratings have too few films with {LIKED:g} stars or more after another rating"
            remedy = "one viewer needs two of them: one to learn from, and one to be judged by"
            raise DataError("ratings", self.folder or self.database or "generated", problem, remedy)
        tested = LastLiked(self.max_history, num_films, log, user[validation], film[validation])
        return Data(liked, validation=tested)

    def inputs(self, batch: Any) -> tuple[Tensor, ...]:
        return tuple(batch[:3])

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        """The liked film is candidate 0."""
        return nn.functional.cross_entropy(outputs, torch.zeros(len(outputs), dtype=torch.long, device=outputs.device))

    def metrics(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        ranks = (outputs > outputs[:, :1]).sum(1)
        _, _, _, is_found, popular, factors = batch
        return {
            "hit_rate": ((ranks < NUM_FIRST) & is_found).float().mean(),
            "hit_rate_popular": (popular & is_found).float().mean(),
            "hit_rate_factors": (factors & is_found).float().mean(),
            "found_rate": is_found.float().mean(),
        }

    def signature(self) -> Signature:
        types = {"history": "INT64", "ratings": "FP32", "candidates": "INT64"}
        inputs = [TensorSignature(name=name, datatype=kind, shape=[-1, -1]) for name, kind in types.items()]  # type: ignore[arg-type]
        return Signature(inputs=inputs, outputs=[TensorSignature(name="scores", datatype="FP32", shape=[-1, -1])])

    def preprocess(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Reject histories without as many ratings, or with a rating that is none; clip stars to the scale."""
        history, stars = arrays["history"], arrays["ratings"]
        if history.shape != stars.shape:
            raise ValueError("history and ratings have different lengths")
        if (is_none := (history > 0) & ~np.isfinite(stars)).any():
            raise ValueError(f"ratings: film {history[is_none][0]} has {stars[is_none][0]} stars, give a number")
        return {**arrays, "ratings": np.where(history > 0, stars.clip(MIN_STARS, MAX_STARS), np.float32(0))}


class Liked:
    """Each liked rating that has an earlier one: the history before it, and the film among random others."""

    def __init__(self, max_history: int, negatives: int, num_films: int, log: tuple[np.ndarray, ...]) -> None:
        self.max_history, self.negatives, self.num_films = max_history, negatives, num_films
        self.user, self.film, self.stars, self.first = order_by_user(*log)
        is_first = np.arange(len(self.user)) == self.first
        self.samples = np.flatnonzero((self.stars >= LIKED) & ~is_first)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(each[0] for each in self.batch(np.array([range(len(self))[index]])))

    def batch(self, indices: np.ndarray) -> tuple[Tensor, ...]:
        at = self.samples[indices]
        history, stars = gather_history(self.film, self.stars, self.first[at], at, self.max_history)
        drawn = np.random.randint(1, self.num_films + 1, (len(at), self.negatives))
        drawn = np.where(drawn == self.film[at, None], 0, drawn)  # the unknown film instead of a second right answer
        candidates = np.concatenate([self.film[at, None], drawn], axis=1)
        flags = np.ones((3, len(at)), bool)  # of validation alone
        return tuple(torch.from_numpy(each) for each in (history, stars, candidates, *flags))


class LastLiked:
    """The last liked film of each viewer as candidate 0, then the others of the factors' 200; whether it is one of
    these, and among the first ten by popularity and by the factors."""

    deterministic = True

    def __init__(
        self, max_history: int, num_films: int, log: tuple[np.ndarray, ...], user: np.ndarray, film: np.ndarray
    ) -> None:
        factorisation = import_factorisation()
        logged, films, stars, _ = order_by_user(*log)
        starts, ends = np.searchsorted(logged, user), np.searchsorted(logged, user, side="right")
        self.history, self.stars = gather_history(films, stars, starts, ends, max_history)
        ratings = factorisation.Ratings(log[0], log[1] - 1, log[2], int(max(logged.max(), user.max())) + 1, num_films)
        items, users = factorisation.fit(ratings, num_factors=10, num_sweeps=8)
        popularity = np.bincount(log[1], minlength=num_films + 1)
        count = min(NUM_CANDIDATES, num_films)
        self.candidates = np.zeros((len(user), count), np.int64)
        self.flags = np.zeros((3, len(user)), bool)
        for row, (one, wanted, start, end) in enumerate(zip(user, film, starts, ends, strict=True)):
            best, _ = factorisation.find_best(items, users[one], films[start:end] - 1, count)
            candidates = best + 1
            is_wanted = candidates == wanted
            others = candidates[~is_wanted][: count - 1]
            is_popular = (popularity[others] > popularity[wanted]).sum() < NUM_FIRST
            self.flags[:, row] = is_wanted.any(), is_popular, is_wanted[:NUM_FIRST].any()
            self.candidates[row, : 1 + len(others)] = np.append(wanted, others)

    def __len__(self) -> int:
        return len(self.candidates)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(each[0] for each in self.batch(np.array([range(len(self))[index]])))

    def batch(self, indices: np.ndarray) -> tuple[Tensor, ...]:
        arrays = self.history, self.stars, self.candidates, *self.flags
        return tuple(torch.from_numpy(each[indices]) for each in arrays)


def order_by_user(user: np.ndarray, film: np.ndarray, stars: np.ndarray) -> tuple[np.ndarray, ...]:
    """User, film and stars [N] by user, each user's in the order of time; and where each user's begin [N]."""
    order = np.argsort(user, kind="stable")
    user = user[order]
    return user, film[order], stars[order], np.searchsorted(user, user)


def gather_history(
    film: np.ndarray, stars: np.ndarray, starts: np.ndarray, ends: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """The last `length` rows of each range, int64 and float32 [B, length], the newest first, padded with 0."""
    at = ends[:, None] - 1 - np.arange(length)
    is_there = at >= starts[:, None]
    at = np.where(is_there, at, 0)
    return np.where(is_there, film[at], 0), np.where(is_there, stars[at], 0.0).astype(np.float32)


def split_last_liked(user: np.ndarray, film: np.ndarray, stars: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows for training, and the row of each user's last liked film, if others come before it. Rows after it are in
    neither, so that nothing of a viewer's future is learnt."""
    liked = np.flatnonzero(stars >= LIKED)
    users, newest = np.unique(user[liked][::-1], return_index=True)
    last = liked[::-1][newest]
    limit = np.full(int(user.max()) + 1, len(user))
    limit[users] = last
    train = np.flatnonzero(np.arange(len(user)) < limit[user])
    has_history = np.isin(user[last], user[train])
    return train, last[has_history]


def import_factorisation() -> Any:
    """`films.factorisation` of the site: NumPy alone."""
    import_site()
    import films.factorisation

    return films.factorisation


def import_site() -> None:
    """Let `films` be imported, wherever the recipes are."""
    folder = str(find_packaged("serve_apps") / "recommender")
    if folder not in sys.path:
        sys.path.append(folder)


@cache
def read_ratings(folder: str, database: str, num_ratings: int) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    """The number of films; user from 0, film id from 1, and stars [N] in the order of time. Raises DataError."""
    import_site()
    from films.movielens import generate, read_folder

    if database:
        return read_database(Path(database).expanduser())
    table = read_folder(folder) if folder else generate(num_ratings=num_ratings)
    user = np.unique(table.user, return_inverse=True)[1]  # a file's ids may be any numbers
    return len(table.films), user, table.film + 1, table.rating


def read_database(path: Path) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    """The same from the site's database, the newest rating of each pair. Raises DataError."""
    query = (
        "SELECT viewer_id, film_id, stars FROM films_rating"
        " WHERE id IN (SELECT max(id) FROM films_rating GROUP BY viewer_id, film_id) ORDER BY id"
    )
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            rows = np.array(connection.execute(query).fetchall(), np.float64).reshape(-1, 3)
            (num_films,) = connection.execute("SELECT max(id) FROM films_film").fetchone()
    except sqlite3.Error as error:
        raise DataError(
            "args.database", str(path), f"cannot be read: {error}", "run `make recommender` once"
        ) from error
    if not len(rows):
        raise DataError("args.database", str(path), "has no ratings", "run `make recommender` once")
    user = np.unique(rows[:, 0], return_inverse=True)[1]
    return int(num_films), user, rows[:, 1].astype(np.int64), rows[:, 2]


def spec() -> TrainSpec:
    """The recipe: until three evaluations are no better than the one before them, whose network is kept."""
    return TrainSpec.parse(
        {
            "task": __file__,
            "name": "movies",
            "batch_size": 256,
            "threads": 1,  # its steps are too small to share
            "optimizer": {"name": "adamw", "learning_rate": 3e-3, "weight_decay": 0.01},
            "stop": {"epochs": 20, "convergence": {"metric": "hit_rate", "direction": "max", "patience": 3}},
            "evaluate": {"every_epochs": 1},
        }
    )


if __name__ == "__main__":
    from shoal.flows.training import train_main

    train_main(spec())

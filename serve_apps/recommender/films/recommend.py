"""What one request computes: the viewer's ratings from the database, fold-in, the candidates, their order.

Called by the views. One `Version` is taken at the beginning and used to the end.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from html import escape
from typing import Any

import numpy as np
from django.conf import settings
from django.db import connection
from django.utils.safestring import SafeString, mark_safe

from films.factorisation import Floats, Ints, find_best, fold_in
from films.rerank import Reranker, Reranking
from films.versions import CurrentVersion, Version
from shoal.home import read_existing_token

NUM_CANDIDATES, NUM_SHOWN = 200, 20
STARS = range(1, 6)


@dataclass(frozen=True)
class Page:
    """All that the page shows. `compute_ms`: fold-in and candidates.

    recommended, rated: rows of HTML, the best and the newest first; "" without any
    """

    recommended: SafeString
    rated: SafeString
    version: Version
    reranking: Reranking
    compute_ms: str


@cache
def current_version() -> CurrentVersion:
    """The versions of this process."""
    return CurrentVersion(settings.RECOMMENDER_MODELS)


@cache
def reranker() -> Reranker:
    """The towers' client of this process."""
    url, model = settings.RECOMMENDER_ENDPOINT, settings.RECOMMENDER_MODEL
    return Reranker(url, model, settings.RECOMMENDER_DEADLINE_S, read_existing_token() if url else "")


def read_history(viewer: int) -> dict[int, float]:
    """Stars by film id, from the oldest rating to the newest; of a film that was rated again the newest counts."""
    history: dict[int, float] = {}
    for film, stars in _query("SELECT film_id, stars FROM films_rating WHERE viewer_id = %s ORDER BY id", [viewer]):
        history.pop(film, None)
        history[film] = stars
    return history


def read_films(ids: list[int]) -> dict[int, tuple[str, str]]:
    """Title and genres by film id."""
    places = ", ".join(["%s"] * len(ids))
    rows = _query(f"SELECT id, title, genres FROM films_film WHERE id IN ({places})", ids)
    return {film: (title, genres) for film, title, genres in rows}


def _query(sql: str, values: list[int]) -> list[tuple[Any, ...]]:
    """The rows. Through the object mapper each of a page's two queries takes four to seven times as long."""
    with connection.cursor() as cursor:
        cursor.execute(sql, values)
        return cursor.fetchall()


def find_candidates(version: Version, history: dict[int, float]) -> tuple[Ints, Floats]:
    """The unrated films [C] with the highest expected stars [C], by position from 0. Films newer than the version are
    none."""
    films = np.fromiter(history, np.int64, len(history)) - 1
    stars = np.fromiter(history.values(), np.float64, len(history))
    is_known = films < version.items.num_items
    films, stars = films[is_known], stars[is_known]
    return find_best(version.items, fold_in(version.items, films, stars), films, NUM_CANDIDATES)


def recommend(viewer: int) -> Page:
    """The page of a viewer. Raises DataError before the first version."""
    version = current_version().get()
    history = read_history(viewer)
    began_s = time.perf_counter()
    candidates, expected = find_candidates(version, history)
    compute_ms = f"{1e3 * (time.perf_counter() - began_s):.2f}"
    rated = np.fromiter(history, np.int64, len(history))
    reranking = reranker().rerank(rated, np.fromiter(history.values(), np.float64, len(history)), candidates + 1)
    order = reranking.order[:NUM_SHOWN]
    shown = dict(zip((candidates[order] + 1).tolist(), expected[order].tolist(), strict=True))
    newest = dict(list(history.items())[: -NUM_SHOWN - 1 : -1])
    films = read_films([*shown, *newest])
    recommended = "".join(_recommended_row(film, *films[film], stars) for film, stars in shown.items())
    own = "".join(_rated_row(film, films[film][0], stars) for film, stars in newest.items())
    return Page(mark_safe(recommended), mark_safe(own), version, reranking, compute_ms)


# Rows of the tables are formatted here: in a loop of the template they are most of what a page takes.


def _recommended_row(film: int, title: str, genres: str, stars: float) -> str:
    buttons = "".join(f'<button name="rating" value="{film}:{each}">{each}</button>' for each in STARS)
    return (
        f'<tr data-film="{film}">\n<td>{escape(title)}<br><small>{escape(genres)}</small></td>\n'
        f"<td>{stars:.2f}</td>\n<td>{buttons}</td>\n</tr>\n"
    )


def _rated_row(film: int, title: str, stars: float) -> str:
    return f'<tr data-film="{film}"><td>{escape(title)}</td><td>{stars:g}</td></tr>\n'

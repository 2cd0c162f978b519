"""What one request computes: the viewer's ratings from the database, fold-in, the candidates, their order.

Called by the views. One `Version` is taken at the beginning and used to the end.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache

import numpy as np
from django.conf import settings
from django.utils.safestring import SafeString, mark_safe

from films.factorisation import Floats, Ints, find_best, fold_in
from films.models import Film, Rating
from films.rerank import Reranker, Reranking
from films.versions import CurrentVersion, Version
from shoal.home import read_existing_token

NUM_CANDIDATES, NUM_SHOWN = 200, 20


@dataclass(frozen=True)
class Line:
    """A film as the page shows it: `stars` are the viewer's, or those that the factors expect."""

    film: Film
    stars: str

    @property
    def buttons(self) -> SafeString:
        """One for each number of stars: a loop of the template takes ten times as long."""
        film = self.film.pk
        return mark_safe(
            "".join(f'<button name="rating" value="{film}:{each}">{each}</button>' for each in range(1, 6))
        )


@dataclass(frozen=True)
class Page:
    """All that the page shows. `compute_ms`: fold-in and candidates; `rated`: the newest first."""

    recommendations: list[Line]
    rated: list[Line]
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
    rows = Rating.objects.filter(viewer_id=viewer).order_by("id").values_list("film_id", "stars")
    for film, stars in rows:
        history.pop(film, None)
        history[film] = stars
    return history


def find_candidates(version: Version, history: dict[int, float]) -> tuple[Ints, Floats]:
    """The films [C] with the highest expected stars [C], by position from 0. Films newer than the version are none."""
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
    shown = dict(zip((candidates[order] + 1).tolist(), expected[order].clip(0.5, 5.0).tolist(), strict=True))
    newest = dict(list(history.items())[: -NUM_SHOWN - 1 : -1])
    films = Film.objects.in_bulk([*shown, *newest])
    recommendations = [Line(films[film], f"{stars:.2f}") for film, stars in shown.items()]
    own = [Line(films[film], f"{stars:g}") for film, stars in newest.items()]
    return Page(recommendations, own, version, reranking, compute_ms)

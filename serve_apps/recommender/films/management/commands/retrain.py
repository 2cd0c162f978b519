"""Learn the ratings since the last version, and write the next: `manage.py retrain`, until it is ended.

Each version holds the ratings that it has learnt and the last row that it has read, in the folder that appears at once:
however often the process is killed, each pair of viewer and film is learnt once, by its newest row.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import numpy as np
from django.conf import settings
from django.core.management.base import BaseCommand

from films.factorisation import Ratings, extend, fit
from films.models import Film, Rating
from films.parent import end_with_parent
from films.versions import RatingLog, open_version, read_current, read_log, write_version

NUM_FACTORS, FIRST_SWEEPS, LATER_SWEEPS = 10, 8, 2


class Command(BaseCommand):
    help = __doc__

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--once", action="store_true", help="one version at most, then end")
        parser.add_argument("--every", type=float, default=5.0, metavar="SECONDS", help="between two looks (default 5)")
        parser.add_argument("--with-parent", action="store_true", help="end when the standard input is closed")

    def handle(self, *, once: bool, every: float, with_parent: bool, **_: Any) -> None:
        if with_parent:
            end_with_parent()
        while True:
            if (made := retrain(settings.RECOMMENDER_MODELS)) is not None:
                number, num_rows, seconds = made
                self.stdout.write(f"version {number}: {num_rows:,} new ratings in {seconds:.1f} s")
                self.stdout.flush()
            if once:
                return
            time.sleep(every)


def retrain(folder: Path) -> tuple[int, int, float] | None:
    """Write the next version: its number, the new rows and seconds; None if there are no new rows.

    The first has FIRST_SWEEPS from random factors, each later one LATER_SWEEPS from the version before.
    """
    began_s = time.perf_counter()
    number = read_current(folder)
    log = RatingLog.empty() if number is None else read_log(folder, number)
    new = read_rows(log.last_row)
    if not len(new[0]):
        return None
    log = log.merge(*new)
    num_films = Film.objects.order_by("-id").values_list("id", flat=True).first() or 0
    viewers, user = np.unique(log.user, return_inverse=True)  # a file's ids may be any numbers
    ratings = Ratings(user, log.film, log.rating, len(viewers), num_films)
    if number is None:
        items, _ = fit(ratings, NUM_FACTORS, FIRST_SWEEPS)
    else:
        items, _ = fit(ratings, NUM_FACTORS, LATER_SWEEPS, extend(open_version(folder, number).items, num_films))
    return write_version(folder, items, log), len(new[0]), time.perf_counter() - began_s


def read_rows(last_row: int) -> tuple[Any, Any, Any, Any]:
    """Viewer, film (from 0), stars and row id of the ratings after `last_row`, [N] each, in the order of their ids."""
    rows = Rating.objects.filter(id__gt=last_row).order_by("id").values_list("viewer_id", "film_id", "stars", "id")
    table = np.array(list(rows.iterator(chunk_size=10_000)), np.float64).reshape(-1, 4)
    viewer, film, row = (table[:, at].astype(np.int64) for at in (0, 1, 3))
    return viewer, film - 1, table[:, 2], row

"""Learn the ratings since the last version, and write the next: `manage.py retrain`, until it is ended.

They come from a `RatingSource`. Each version holds the ratings that it has learnt and the last row that it has read, in
the folder that appears at once, and the source begins after that row: however often the process is killed, each pair of
viewer and film is learnt once, by its newest row.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import numpy as np
from django.conf import settings
from django.core.management.base import BaseCommand

from films.factorisation import Floats, Ints, Ratings, extend, fit
from films.models import Film
from films.parent import end_with_parent
from films.rating_source import PUBLISHER, RatingSource
from films.versions import RatingLog, open_version, read_current, read_log, write_version
from shoal.sources import StreamSource, StreamState

NUM_FACTORS, FIRST_SWEEPS, LATER_SWEEPS = 10, 8, 2
POLL_MESSAGES = 10_000


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
    source = RatingSource()
    source.open(StreamState(sequences={PUBLISHER: log.last_row}))
    new = take_all(source)
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
    number = write_version(folder, items, log)
    source.commit(StreamState(source.num_delivered, {PUBLISHER: log.last_row}))
    return number, len(new[0]), time.perf_counter() - began_s


def take_all(source: StreamSource) -> tuple[Ints, Ints, Floats, Ints]:
    """Viewer, film (from 0), stars and row id of the ratings that are there, [N] each, in the order of their ids."""
    tables = [np.zeros((0, 4))]
    while messages := source.poll(POLL_MESSAGES, timeout_s=0.0).messages:
        tables.append(np.array([(int(each.sensor), *each.values, each.sequence) for each in messages], np.float64))
    viewer, stars, film, row = np.concatenate(tables).T
    return viewer.astype(np.int64), film.astype(np.int64) - 1, stars, row.astype(np.int64)
